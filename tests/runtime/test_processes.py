"""What several processes do together: collectives, barriers that name the late, order, seeds, clear errors."""

from __future__ import annotations

import random
import socket
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from piledriver.accelerator.state.process_info import RunState
from piledriver.runtime import process_order as order
from piledriver.runtime import seeds
from piledriver.runtime.collectives import operations as collectives
from piledriver.runtime.collectives.barrier import barrier
from piledriver.runtime.collectives.trigger import Trigger
from piledriver.runtime.connection import connect
from piledriver.runtime.environment import patched
from piledriver.runtime.errors import (
    DisagreementError,
    LateRankError,
    PortTakenError,
    RendezvousError,
    WorldError,
)
from piledriver.runtime.launch.function import run_on_processes
from piledriver.runtime.world import World, detect_world
from tests.checkpoint.processes import Started


def _joined() -> World:
    world = detect_world(device="cpu")
    connect(world)
    return world


def _wait_for(files: list[Path]) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.05)


def _meet(where: Path, rank: int) -> None:
    """Two processes wait for each other, without what is tested."""
    where.with_suffix(f".{rank}").touch()
    _wait_for([where.with_suffix(f".{r}") for r in range(2)])


def _everything(folder: str) -> None:
    world = _joined()
    n, rank = world.size, world.rank
    ours = {"a": torch.tensor([rank, 10 * rank]), "b": (torch.tensor(True), [torch.tensor(1.5).bfloat16()])}
    gathered = collectives.gather(world, ours)
    assert gathered["a"].tolist() == [value for r in range(n) for value in (r, 10 * r)]
    assert gathered["b"][0].tolist() == [True] * n
    assert gathered["b"][1][0].dtype is torch.bfloat16
    assert collectives.gather(world, torch.arange(6).view(2, 3).t()).shape == (3 * n, 2)

    mine = torch.tensor([float(rank + 1)])
    assert collectives.reduce(world, mine, "sum").item() == n * (n + 1) / 2
    assert collectives.reduce(world, mine, "mean").item() == (n + 1) / 2
    assert collectives.reduce(world, mine, "max").item() == n
    assert mine.item() == rank + 1, "the input must not change"
    assert collectives.broadcast(world, mine, source=n - 1).item() == n
    padded = collectives.pad_across_processes(world, torch.full((rank + 1,), 7), pad_index=-1, pad_first=True)
    assert padded.tolist() == [-1] * (n - rank - 1) + [7] * (rank + 1)
    part = collectives.scatter(world, {"x": torch.arange(2 * n)} if rank == 0 else None)
    assert part["x"].tolist() == [2 * rank, 2 * rank + 1]
    assert collectives.gather_object(world, f"r{rank}") == [f"r{r}" for r in range(n)]
    assert collectives.broadcast_object(world, {"from": rank}) == {"from": 0}

    flag = Trigger(world)
    if rank == n - 1:
        flag.raise_flag()
    assert flag.check()
    assert not flag.check()

    seeds.set_seed(1, rank=rank)
    assert len(set(collectives.gather_object(world, torch.rand(1).item()))) == n
    seeds.synchronise_rng(world, ["torch", "numpy", "python"])
    drawn = (torch.rand(1).item(), random.random(), float(np.random.rand()))
    assert len(set(collectives.gather_object(world, drawn))) == 1

    log = Path(folder) / f"order-{n}"
    with order.main_process_first(world):
        if rank == 0:
            time.sleep(0.2)
        with log.open("a") as file:
            file.write(f"{rank}\n")
    barrier(world)
    assert log.read_text().splitlines()[0] == "0"
    assert RunState(world, "no").on_process(lambda: "done", n - 1)() == ("done" if rank == n - 1 else None)

    checked = world.with_debug()
    with pytest.raises(DisagreementError, match=f"rank {n - 1} differs from the others in gather"):
        collectives.gather(checked, torch.zeros(3 if rank == n - 1 else 2))
    with pytest.raises(DisagreementError, match="in the operation"):
        (collectives.gather if rank == n - 1 else collectives.reduce)(checked, torch.zeros(2))
    with pytest.raises(DisagreementError, match="its structure"):
        collectives.gather(checked, [torch.zeros(1)] * (2 if rank == n - 1 else 1))

    # The late one comes when all others gave up, however slow the machine is today.
    gave_up = [Path(folder) / f"gave-up-{n}-{r}" for r in range(n - 1)]
    barrier(world)
    if rank == n - 1:
        _wait_for(gave_up)
    else:
        with pytest.raises(LateRankError, match=f"'breakfast' for rank {n - 1}"):
            barrier(world, timeout=timedelta(seconds=2), name="breakfast")
        gave_up[rank].touch()
    # Those that gave up have used their turn; the late one takes its own, and all meet at the next.
    if rank == n - 1:
        barrier(world, name="breakfast")
    barrier(world, name="lunch")


@pytest.mark.slow
def test_processes_together(tmp_path: Path) -> None:
    run = Started(_everything, str(tmp_path), output=tmp_path / "output.txt", processes=3)
    assert run.wait() == 0, run.output.read_text()


def _fails_on_one() -> None:
    if _joined().rank == 1:
        raise KeyError("only I know")


@pytest.mark.slow
def test_what_a_rank_raises_is_raised_here() -> None:
    with pytest.raises(KeyError, match="only I know") as caught:
        run_on_processes(_fails_on_one, (), 2, fork=False)
    assert "raised on rank 1" in caught.value.__notes__[0]


PATIENCE_SECONDS = 4
WRONG_SIZES = {
    (2, 4): "world sizes differ: rank 0 has 2, rank 1 on .* has 4",
    (3, 3): "1 of 3 ranks did not connect within 4 s: rank 2",
}


def _disagree_on_size(folder: str, ports: list[int]) -> None:
    rank = detect_world(device="cpu").rank
    with patched(piledriver_rendezvous_file=""):
        import os

        del os.environ["PILEDRIVER_RENDEZVOUS_FILE"]
        for (sizes, message), port in zip(WRONG_SIZES.items(), ports, strict=True):
            # What is measured is patience, not how long processes take to start: they begin together.
            _meet(Path(folder) / f"begin-{port}", rank)
            environ = {"RANK": rank, "WORLD_SIZE": sizes[rank], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            world = detect_world({name: str(value) for name, value in environ.items()}, device="cpu")
            with pytest.raises(RendezvousError, match=message):
                connect(world, rendezvous_timeout=timedelta(seconds=PATIENCE_SECONDS))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_a_wrong_world_size_is_one_error_on_every_rank(tmp_path: Path) -> None:
    ports = [_free_port() for _ in WRONG_SIZES]
    run = Started(_disagree_on_size, str(tmp_path), ports, output=tmp_path / "output.txt", processes=2)
    assert run.wait() == 0, run.output.read_text()


def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        world = World(rank=0, size=2, local_size=2, backend="gloo", address="127.0.0.1", port=port)
        with pytest.raises(PortTakenError, match=f"port {port}"):
            connect(world, rendezvous_timeout=timedelta(seconds=2))


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(WorldError, match="rank 3 is not below the world size"):
        RunState(World(), "no").on_process(print, 3)


def test_generators_come_back() -> None:
    saved = seeds.capture_rng()
    first = torch.rand(2).tolist(), random.random(), np.random.rand()
    seeds.restore_rng(saved)
    assert first == (torch.rand(2).tolist(), random.random(), np.random.rand())
