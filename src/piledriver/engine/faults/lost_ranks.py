"""Identify lost ranks: when a collective fails, surviving ranks report through the store what they were doing.

A rank without a report is dead or still blocked; the process table tells which for ranks on this machine. The error
names the dead ranks, else those without a report, else those that were in another operation.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from piledriver.engine.errors import LayoutError
from piledriver.engine.faults.same_batch import check_batches, uncheck_batches
from piledriver.engine.state import state_of
from piledriver.engine.torch_private import process_groups
from piledriver.runtime.collectives.agreement import check_agreement
from piledriver.runtime.collectives.operations import is_lost_peer
from piledriver.runtime.errors import DisagreementError, LostPeerError
from piledriver.runtime.torch_private import default_store
from piledriver.runtime.world import World

POLL_SECONDS = 5.0
"""How long to wait for reports while several ranks are missing."""
MIN_POLL_SECONDS = 1.0
"""How long to wait at least, for ranks that fail a moment later."""


@contextmanager
def report_lost_ranks(doing: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Turn torch's connection errors into one that names the lost rank of the world or of a group.

    `doing` names the operation and its count: a rank that took another branch is found by it.
    """
    try:
        yield
    except RuntimeError as error:
        _raise_lost_ranks(error, doing, group)
        raise


def _raise_lost_ranks(error: BaseException, doing: str, group: dist.ProcessGroup | None) -> None:
    cause: BaseException | None = error
    while cause is not None and not is_lost_peer(cause):
        cause = cause.__cause__
    if cause is None or not dist.is_initialized():
        return
    reported, missing = _poll_ranks_in_time(doing, group)
    said = next(iter(str(cause).splitlines()), "")
    prefix = f"rank {dist.get_rank()}: {doing} failed because"
    if missing:
        who = ", ".join(map(str, missing))
        raise LostPeerError(
            f"{prefix} rank {who} is gone, hangs or does something else: {said}",
            fix="look at that rank's log; raise the timeout if it was only slow",
        ) from error
    odd = _outliers(reported)
    if odd:
        others = ", ".join(f"rank {rank} was in {reported[rank]}" for rank in odd)
        raise DisagreementError(
            f"{prefix} ranks run different operations: {others}", fix="make every rank take the same branches"
        ) from error
    raise LostPeerError(
        f"{prefix} another process is gone or cannot be reached: {said}",
        fix="look for the first rank that failed in the logs; Layout(debug=True) names one that takes another branch",
    ) from error


def _outliers(reported: dict[int, str]) -> list[int]:
    """Return the ranks whose operation is not the most common one; of two ranks the second."""
    usual = Counter(reported[rank] for rank in sorted(reported)).most_common(1)
    return [rank for rank in sorted(reported) if reported[rank] != usual[0][0]] if usual else []


def _poll_ranks_in_time(doing: str, group: dist.ProcessGroup | None) -> tuple[dict[int, str], list[int]]:
    """Poll with a time limit: without a network the store itself blocks for minutes, and no rank is named."""
    box = [({dist.get_rank(): doing}, list[int]())]
    caller = threading.Thread(target=lambda: box.append(_poll_ranks(doing, group)), daemon=True)
    caller.start()
    caller.join(2 * POLL_SECONDS + MIN_POLL_SECONDS)
    return box[-1]


def _poll_ranks(doing: str, group: dist.ProcessGroup | None) -> tuple[dict[int, str], list[int]]:
    """Return what each reporting rank was doing, and the missing ranks: the dead ones if known."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    me = dist.get_rank()
    keys = {rank: f"piledriver/lost/{'-'.join(map(str, ranks))}/{rank}" for rank in ranks}
    try:
        store = default_store()
        store.set(keys[me], doing)
        for one in [group] if group is not None else process_groups():
            with suppress(RuntimeError):
                one.abort()
        start = time.monotonic()
        while True:
            missing = [rank for rank in ranks if not store.check([keys[rank]])]
            dead = [rank for rank in missing if _is_dead(rank)]
            waited = time.monotonic() - start
            if waited > (MIN_POLL_SECONDS if dead or len(missing) <= 1 else POLL_SECONDS):
                reported = {rank: store.get(keys[rank]).decode() for rank in ranks if rank not in missing}
                _leave_last(store, keys, me, list(reported))
                return reported, dead or missing
            time.sleep(0.05)
    except (dist.DistError, RuntimeError):
        # The process that serves the store is gone: there are no reports, only the process table.
        return {me: doing}, [rank for rank in ranks if rank != me and _is_dead(rank)]


def _leave_last(store: Any, keys: dict[int, str], me: int, reporting: list[int]) -> None:
    """Keep rank 0, which may serve the store, until the other reporting ranks have read it: else it is blamed."""
    store.set(f"{keys[me]}/read", "")
    end = time.monotonic() + POLL_SECONDS
    others = [f"{keys[rank]}/read" for rank in reporting if rank != me]
    while me == 0 and others and not store.check(others) and time.monotonic() < end:
        time.sleep(0.05)


_PROCESSES: dict[int, tuple[str, int]] = {}
"""Host and process id of every rank, known before anything fails."""


def register_rank() -> None:
    """Exchange the hosts and process ids of all ranks. Collective."""
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (socket.gethostname(), os.getpid()))
    _PROCESSES.update(enumerate(places))


def _is_dead(rank: int) -> bool:
    """Whether a rank of this machine has exited; False if unknown."""
    host, pid = _PROCESSES.get(rank, ("", 0))
    if host != socket.gethostname():
        return False
    try:
        # A zombie still accepts signals.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in ("Z", "X")
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


class _ReportLostRanks:
    """The call of a model whose forward communicates. torch drops it from copies of the model."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            # Counting inside a graph would recompile it every time.
            self.calls += 1
        try:
            return self.call(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" in str(error):
                raise LayoutError(
                    "the model reads a submodule's weights without calling it, which sharded weights do not support",
                    fix="use zero=1 or 2 without tp, or call the submodule",
                ) from error
            _raise_lost_ranks(error, f"forward number {self.calls}", None)
            raise


class _Announce:
    """Compares ranks before a sharded module's forward, before anything is gathered for it."""

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self.name, self.tell = name, tell

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        self.tell(f"the forward of {self.name or 'the model'}")

    def __deepcopy__(self, memo: Any) -> _Announce:
        return type(self)(self.name, _no_check)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, _no_check)


class _AnnounceEnd(_Announce):
    """Compares ranks after the model's forward."""

    def __call__(self, _module: nn.Module, _args: Any, _out: Any = None) -> None:
        self.tell("the end of the forward")


def _no_check(_what: str) -> None:
    return None


def watch_collectives(model: nn.Module, world: World) -> None:
    """Report ranks lost in a forward that communicates (pipelines do so themselves).

    With `debug`, also compare the ranks before each sharded module.
    """
    known = state_of(model)
    if known is None or known.mesh.layout.reducer == "ddp" or known.pipeline is not None:
        return
    tell = None
    if known.mesh.layout.debug or world.debug:
        tell = functools.partial(check_agreement, world.with_debug(), data=())
        check_batches(model, known.mesh)
    watch_forward(model, tell)


def watch_forward(model: nn.Module, tell: Callable[[str], None] | None = None) -> None:
    """Report ranks lost in this model's forward; `tell`, if given, is called before each sharded module."""
    model._compiled_call_impl = _ReportLostRanks(model._compiled_call_impl or model._call_impl)
    if tell is None:
        return
    from torch.distributed.fsdp import FSDPModule

    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            _hook(module, _Announce(name, tell))
    # A rank that leaves out the last modules is found before its backward gathers others.
    model.register_forward_hook(_AnnounceEnd("", tell))


def _hook(module: Any, hook: Callable[..., None]) -> None:
    module.register_forward_pre_hook(hook, prepend=True)


def unwatch_forward(model: nn.Module) -> None:
    """Undo `watch_forward`."""
    if isinstance(watcher := model._compiled_call_impl, _ReportLostRanks):
        model._compiled_call_impl = watcher.call if watcher.call != model._call_impl else None
    uncheck_batches(model)
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, _Announce):
                del module._forward_pre_hooks[key]
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(hook, _AnnounceEnd):
            del model._forward_hooks[key]
