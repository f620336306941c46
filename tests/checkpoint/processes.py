"""Gloo processes for tests, started from one server that has torch imported already."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from piledriver.runtime.environment import RENDEZVOUS_FILE
from tests.patience import HANG_S

_CONTEXT = multiprocessing.get_context("forkserver")
# `torch._dynamo` is what the first sharded step would import, in every process again.
_CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "piledriver.accelerator.accelerator",
        "piledriver.engine.data_parallel.zero",
        "piledriver.checkpoint",
        "piledriver.models",
        "piledriver.optim",
        "piledriver.train.loop",
        # Models of many families are built of what these import.
        "transformers.models.llama.modeling_llama",
        "transformers.models.mixtral.modeling_mixtral",
    ]
)


class Started:
    """`function(*arguments)` on processes that find each other as launched ones do; their output goes to a file."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, output: Path, processes: int = 1) -> None:
        self.output = output
        store = output.with_suffix(".store")
        store.unlink(missing_ok=True)
        output.unlink(missing_ok=True)
        place = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, RENDEZVOUS_FILE: store}
        self.workers = [
            _CONTEXT.Process(target=_as_launched, args=(rank, place, output, function, arguments))
            for rank in range(processes)
        ]
        for worker in self.workers:
            worker.start()

    def ended(self) -> bool:
        return any(worker.exitcode is not None for worker in self.workers)

    def signal(self, number: int) -> None:
        """Send a signal to each process and to what it has started."""
        for worker in self.workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, number)

    def wait(self) -> int:
        """Return the first exit code that is not 0, once all have ended."""
        for worker in self.workers:
            worker.join(HANG_S)
        codes = [worker.exitcode for worker in self.workers]
        return next((code for code in codes if code != 0), 0)


def _as_launched(
    rank: int, place: dict[str, Any], output: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if place["WORLD_SIZE"] > 1:
        place |= {"RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    gc.freeze()
    sys.exit(function(*arguments))


def run(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = HANG_S,
    dying: Collection[int] = (),
    patience: timedelta | None = None,
) -> list[Any]:
    """`function(rank, *arguments)` on each rank of a gloo group; what each returned (None of those that will die).

    `patience` is how long a collective waits for the others.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers: Any = _CONTEXT.Queue()
        shared = (size, folder, function, arguments, answers, bool(dying), patience)
        workers = [_CONTEXT.Process(target=_work, args=(rank, *shared)) for rank in range(size)]
        for worker in workers:
            worker.start()
        found: dict[int, tuple[str, Any]] = {}
        try:
            while len(found) < size - len(dying) and not any(outcome == "error" for outcome, _ in found.values()):
                rank, answer = pickle.loads(answers.get(timeout=timeout_s))
                found[rank] = answer
        finally:
            for worker in workers:
                # The others may wait in a collective for the one that failed.
                worker.join(timeout=10 if len(found) == size - len(dying) else 0.5)
                if worker.is_alive():
                    worker.kill()
    failed = {rank: answer[1] for rank, answer in found.items() if answer[0] == "error"}
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())
    return [found[rank][1] if rank in found else None for rank in range(size)]


def _work(
    rank: int,
    size: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    answers: Any,
    some_die: bool,
    patience: timedelta | None,
) -> None:
    torch.set_num_threads(1)
    # What the server imported is a lot to look through, each time that an Accelerator frees its memory.
    gc.freeze()
    try:
        store = f"file://{Path(folder, 'store')}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=patience)
        _answer(answers, rank, "done", function(rank, *arguments))
        if not some_die:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        _answer(answers, rank, "error", traceback.format_exc())


def _answer(answers: Any, rank: int, outcome: str, value: Any) -> None:
    # As bytes: torch would hand tensors over through shared memory that dies with the worker.
    answers.put(pickle.dumps((rank, (outcome, value))))
