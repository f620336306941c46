"""Document boundaries of packed batches (cu_seqlens), which attention's FLOPs depend on and a trace does not hold.

They are seen as arguments of modules: a 1-D int32 tensor, or the `boundaries` of a mask. Tensors are read after the
window, so that nothing is synchronised within it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from piledriver.observe.torch_private import compiled_call


class BoundarySightings:
    """Watches the arguments of modules during a profile."""

    def __init__(self, modules: Iterable[nn.Module], now_ns: Any) -> None:
        self._modules, self._now_ns = list(modules), now_ns
        self._stack = ExitStack()
        self._seen: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

    def __enter__(self) -> BoundarySightings:
        for module in self._modules:
            compiled = compiled_call(module)
            if compiled is None:
                handle = module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
                self._stack.callback(handle.remove)
                continue
            # Hooks of a compiled module are part of its graph.
            module._compiled_call_impl = self._looking(compiled)
            self._stack.callback(setattr, module, "_compiled_call_impl", compiled)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def offsets(self) -> list[tuple[int, list[int]]]:
        """Return what was seen, with the time of the Unix clock at which it was."""
        found = [(time_ns, [int(one) for one in tensor.tolist()]) for time_ns, tensor in self._seen.values()]
        return [(time_ns, one) for time_ns, one in found if one[0] == 0 and one == sorted(one)]

    def _before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._look(args, kwargs)

    def _looking(self, compiled: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._look(args, kwargs)
            return compiled(*args, **kwargs)

        return call

    def _look(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            tensor = value if isinstance(value, torch.Tensor) else getattr(value, "boundaries", None)
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int32 and tensor.dim() == 1 < tensor.numel():
                self._seen.setdefault((id(tensor), tensor._version), (self._now_ns(), tensor))


class DocumentBoundaries:
    """Boundaries by the time from which they held, in microseconds of a trace."""

    def __init__(self, sightings: Iterable[tuple[float, Sequence[int]]] = ()) -> None:
        self._sightings = sorted((time, list(offsets)) for time, offsets in sightings)

    def at(self, time: float, count: int, tokens: int) -> torch.Tensor | None:
        """Return the latest boundaries before a time that have this length and end at this token; None without."""
        place = bisect_right(self._sightings, time, key=lambda one: one[0])
        for _, offsets in reversed(self._sightings[:place]):
            if len(offsets) == count and offsets[-1] == tokens:
                return torch.tensor(offsets, dtype=torch.int32)
        return None
