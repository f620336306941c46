"""The pool: order kept, crashes and hangs reported and survived, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import connection

import pytest

from piledriver.core.errors import PiledriverError
from piledriver.core.object_reference import object_reference
from piledriver.core.worker_pool import FailedTask, WorkerPool
from tests.patience import HANG_S

pytestmark = pytest.mark.slow


def act(task: tuple[str, int]) -> int:
    """What the workers of these tests run."""
    kind, number = task
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        while True:
            time.sleep(1)
    if kind == "raise":
        raise ValueError("no")
    if kind == "slow":
        time.sleep(0.05 * (number % 3))
    if kind == "memory":
        return len(bytearray(8 << 30))
    return number


def test_results_come_in_the_order_of_the_tasks() -> None:
    with WorkerPool(2, act) as pool:
        assert list(pool.map(("slow", i) for i in range(20))) == list(range(20))


def test_a_worker_that_dies_costs_its_task_alone() -> None:
    tasks = [("die" if i % 4 == 1 else "echo", i) for i in range(8)]
    with WorkerPool(2, act) as pool:
        results = list(pool.map(tasks))
    assert [result for result in results if not isinstance(result, FailedTask)] == [0, 2, 3, 4, 6, 7]
    assert all("SIGKILL" in result.why for result in results if isinstance(result, FailedTask))


def test_a_worker_that_hangs_is_ended() -> None:
    with WorkerPool(2, act, task_seconds=5) as pool:
        results = list(pool.map([("echo", 0), ("hang", 1), ("echo", 2)]))
    assert [results[0], results[2]] == [0, 2]
    assert isinstance(results[1], FailedTask)
    assert "longer than 5 s" in results[1].why


def test_a_worker_whose_parent_was_interrupted_says_nothing() -> None:
    ours, theirs = socket.socketpair()
    command = [
        sys.executable,
        "-m",
        "piledriver.core.worker_pool",
        str(theirs.fileno()),
        object_reference(act),
        str(8 << 30),
    ]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as worker:
        theirs.close()
        with connection.Connection(ours.detach()) as pipe:
            assert pipe.recv() == (True, "started")
            pipe.send(("slow", 2))
        _, said = worker.communicate(timeout=HANG_S)
    assert (worker.returncode, said) == (0, b"")


def test_an_exception_comes_back_and_memory_is_bounded() -> None:
    with WorkerPool(1, act) as pool, pytest.raises(ValueError, match="no"):
        list(pool.map([("raise", 0)]))
    with WorkerPool(1, act) as pool, pytest.raises(MemoryError):
        list(pool.map([("memory", 0)]))


def test_workers_that_cannot_start_are_an_error_not_a_loss() -> None:
    def missing(task: object) -> None:
        """A function that a worker cannot import."""

    missing.__module__, missing.__qualname__ = "no.such.module", "x"
    with WorkerPool(1, missing) as pool, pytest.raises(PiledriverError, match="could not start"):
        list(pool.map([1, 2]))


def test_workers_end_when_their_parent_is_killed() -> None:
    code = f"""
import sys
sys.path.insert(0, {os.getcwd()!r})
from piledriver.core.errors import PiledriverError
import os.path
from piledriver.core.worker_pool import WorkerPool
pool = WorkerPool(2, os.path.basename)
print(*[w.process.pid for w in pool._workers], flush=True)
list(pool.map(["a"]))
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    for _ in range(100):
        if not any(_running(pid) for pid in pids):
            return
        time.sleep(0.1)
    raise AssertionError("workers outlive their parent")


def _running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
