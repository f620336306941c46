"""Every use of torch's private API in this room, so that an upgrade of torch is checked in one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch._subclasses.fake_tensor import FakeTensor

__all__ = [
    "annotation",
    "clear_workspaces",
    "compiled_call",
    "dump_flight_recorder",
    "enable_collective_timing",
    "group_size",
    "local_tensor",
    "recompilations",
]


def annotation(name: str) -> Any:
    """Return a context that appears in a trace under a name, at a fraction of the cost of `record_function`."""
    return _RecordFunctionFast(name)


def local_tensor(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that hold the data of a tensor: of a DTensor its shard, of a subclass its parts.

    Fake tensors, which a compiler may have left, hold none.
    """
    inner = getattr(tensor, "_local_tensor", None)
    if isinstance(inner, torch.Tensor):
        yield from local_tensor(inner)
    elif hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from local_tensor(getattr(tensor, name))
    elif not isinstance(tensor, FakeTensor):
        yield tensor


def compiled_call(module: torch.nn.Module) -> Any:
    """Return the compiled call of a module that `module.compile()` made, or None."""
    return getattr(module, "_compiled_call_impl", None)


def recompilations() -> tuple[int, float]:
    """Return how many frames torch compiled in this process, and the seconds that this took."""
    import sys

    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0, 0.0
    times = utils.compilation_time_metrics
    frames = times.get("_compile.compile_inner") or times.get("entire_frame_compile") or []
    return len(frames), float(sum(frames))


def clear_workspaces() -> None:
    """Release cuBLAS's workspaces, so that their next use allocates them under the name of its operator."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch._C._cuda_clearCublasWorkspaces()


def dump_flight_recorder(*, entries: bool = True) -> str:
    """Return the Flight Recorder as JSON, with its entries or only its counters; empty if this torch has none."""
    from torch._C import _distributed_c10d

    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            found = dump(entries)
            return found.decode() if isinstance(found, bytes) else str(found)
    return ""


def group_size(name: str) -> int:
    """Return the number of ranks of a process group by its name; 0 if no group has that name."""
    try:
        groups: Any = torch.distributed.distributed_c10d
        return int(groups._resolve_process_group(name).size())
    except (RuntimeError, KeyError, ValueError, TypeError):
        return 0


def enable_collective_timing() -> None:
    """Let NCCL time its collectives by events, which the Flight Recorder then reports."""
    group: Any = torch.distributed.distributed_c10d._get_default_group()
    group._enable_collectives_timing()
