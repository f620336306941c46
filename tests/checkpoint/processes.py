"""Gloo processes for tests, started from one server that has torch imported already."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.patience import HANG_S

_CONTEXT = multiprocessing.get_context("forkserver")
# `torch._dynamo` is what the first sharded step would import, in every process again.
_CONTEXT.set_forkserver_preload(
    [
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
    ]
)


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
