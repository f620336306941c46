"""A save that is interrupted is never taken for a good one and never destroys the previous one."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piledriver.checkpoint import (
    Checkpointer,
    Contents,
    checkpoints,
    folder_for,
    is_complete,
    latest,
    load,
    read_header,
    save,
    verify,
)
from piledriver.core.errors import PiledriverError
from tests.checkpoint.processes import run as on_ranks

pytestmark = pytest.mark.slow

CALLS = ("write", "fsync", "replace", "rename", "mkdir", "unlink", "rmdir")


def model_of(step: int, size: int = 64) -> nn.Module:
    """A model that says in every weight which step it belongs to."""
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return model


def check_good(folder: Path, size: int = 64) -> int:
    """The folder is whole, and all of it belongs to the step that its header names."""
    step = verify(folder).step
    assert step is not None
    model = model_of(-1, size)
    assert load(folder, Contents(models=[model])).step == step
    assert all(torch.all(parameter == step) for parameter in model.parameters())
    return step


def die_at(call_number: int) -> None:
    """From now on, kill this process by SIGKILL at its n-th change of the disk; a write is cut in the middle."""
    seen = 0

    def deadly(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == call_number:
                if name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, deadly(name, getattr(os, name)))


def in_child(action: Callable[[], None]) -> int:
    """Run an action in a fork; 0 if it ended, 9 if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def every_moment(rank: int, root: str, same_folder: bool, total_limit: int | None) -> int:
    """Kill a save at each of its changes of the disk, one after the other, and look at what is left."""
    for call_number in range(1, 200):
        folder = Path(root, str(call_number))
        for step in (0, 1):
            save(folder_for(folder, step), Contents(models=[model_of(step)]), step=step)
        target = folder_for(folder, 1 if same_folder else 2)

        def doomed(target: Path = target, call_number: int = call_number) -> None:
            die_at(call_number)
            save(target, Contents(models=[model_of(2)]), step=2, total_limit=total_limit)

        outcome = in_child(doomed)
        assert outcome in (0, signal.SIGKILL), outcome
        found = latest(folder)
        assert found is not None
        assert check_good(found) in ((2,) if outcome == 0 else (1, 2))
        for path in checkpoints(folder):
            check_good(path)
        # And the next save works, whatever the dead one left, and cleans up after it.
        save(target, Contents(models=[model_of(3)]), step=3, total_limit=1)
        assert check_good(target) == 3
        assert [path.name for path in folder.iterdir()] == [target.name]
        assert len(list(target.iterdir())) == 2
        shutil.rmtree(folder)
        if outcome == 0:
            return call_number
    raise AssertionError("the save never ended")


@pytest.mark.parametrize(("same_folder", "total_limit"), [(False, None), (True, None), (False, 1)])
def test_killed_at_every_change_of_the_disk(tmp_path: Path, same_folder: bool, total_limit: int | None) -> None:
    (moments,) = on_ranks(1, every_moment, str(tmp_path), same_folder, total_limit)
    assert moments > 10


def saves_without_end(root: str, start: int, asynchronous: bool) -> None:
    saver = Checkpointer()
    for step in range(start, start + 1000):
        model = model_of(step, 512)
        saver.save(
            folder_for(root, step), Contents(models=[model]), step=step, asynchronous=asynchronous, total_limit=2
        )
        with torch.no_grad():
            model[0].weight.fill_(-5)


def random_moments(rank: int, root: str) -> list[int]:
    draw = random.Random(0)
    save(folder_for(root, 0), Contents(models=[model_of(0, 512)]), step=0)
    steps = [0]
    for attempt in range(60):
        # A loaded machine may need more attempts until children reach their saves.
        if attempt >= 12 and steps[-1] > 5:
            break
        child = os.fork()
        if child == 0:
            saves_without_end(root, steps[-1] + 1, asynchronous=bool(attempt % 2))
            os._exit(0)
        time.sleep(draw.uniform(0.01, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = latest(root)
        assert found is not None
        steps.append(check_good(found, 512))
        assert steps[-1] >= steps[-2]
    return steps


def test_killed_at_random_moments(tmp_path: Path) -> None:
    (steps,) = on_ranks(1, random_moments, str(tmp_path))
    # It got anywhere at all, so that kills fell into saves and not only into starts.
    assert steps[-1] > 5


def limited(rank: int, root: str, limited_rank: int, asynchronous: bool) -> str:
    if rank == limited_rank:
        sys.dont_write_bytecode = True  # Python would keep a beginning of what it compiles, and trust it
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    saver = Checkpointer()
    try:
        saver.save(
            folder_for(root, 1), Contents(models=[model_of(1, 256)]), step=1, asynchronous=asynchronous, total_limit=1
        )
        saver.wait()
    except PiledriverError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        # The same saver goes on after the disk has room again.
        saver.save(folder_for(root, 2), Contents(models=[model_of(2, 256)]), step=2)
        saver.close()
        return str(error)
    return "saved"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("ranks", "limited_rank"), [(1, 0), (2, 1)])
def test_a_file_that_may_not_grow(tmp_path: Path, ranks: int, limited_rank: int, asynchronous: bool) -> None:
    save(folder_for(tmp_path, 0), Contents(models=[model_of(0, 256)]), step=0)
    messages = on_ranks(ranks, limited, str(tmp_path), limited_rank, asynchronous)
    assert all("cannot write" in message and "Fix:" in message for message in messages), messages
    assert ranks == 1 or "rank 1" in messages[0]
    assert [read_header(path).step for path in checkpoints(tmp_path)] == [0, 2]
    assert not folder_for(tmp_path, 1).exists()
    assert check_good(folder_for(tmp_path, 0), 256) == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a full disk needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    save(folder_for(small_disk, 0), Contents(models=[model_of(0, 256)]), step=0)
    for asynchronous in (False, True):
        saver = Checkpointer()
        with pytest.raises(PiledriverError, match="No space left"):
            saver.save(
                folder_for(small_disk, 1), Contents(models=[model_of(1, 400)]), step=1, asynchronous=asynchronous
            )
            saver.wait()
        assert not is_complete(folder_for(small_disk, 1))
        assert latest(small_disk) == folder_for(small_disk, 0)
        assert check_good(folder_for(small_disk, 0), 256) == 0
