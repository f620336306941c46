"""Count samples, tokens and padding in the inputs of the outermost modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

_MASKS = ("attention_mask", "mask", "padding_mask")
_IDS = ("input_ids", "tokens", "ids", "inputs")


class BatchShapes:
    """Watches the inputs of models during a profile. Counts stay on the device until `totals`."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._stack = ExitStack()
        self._calls = 0
        self._samples = 0
        self._tokens = 0
        self._padding: list[torch.Tensor] = []

    def __enter__(self) -> BatchShapes:
        for model in self._models:
            handle = model.register_forward_pre_hook(self._look, with_kwargs=True, prepend=True)
            self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def totals(self) -> dict[str, float]:
        """Return calls, samples, tokens and padded tokens of the window."""
        if not self._calls:
            return {}
        padding = sum(float(one) for one in self._padding)
        return {"calls": self._calls, "samples": self._samples, "tokens": self._tokens, "padding": padding}

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() is False:
            return
        named = dict(kwargs)
        if args and isinstance(args[0], Mapping):
            named.update(args[0])
        tensors = [one for one in (*args, *named.values()) if isinstance(one, torch.Tensor) and one.dim() > 0]
        if not tensors:
            return
        ids = next((named[name] for name in _IDS if isinstance(named.get(name), torch.Tensor)), tensors[0])
        self._calls += 1
        self._samples += ids.shape[0]
        if ids.dim() < 2 or ids.is_floating_point():
            return
        self._tokens += ids.shape[0] * ids.shape[1]
        mask = next((named[name] for name in _MASKS if isinstance(named.get(name), torch.Tensor)), None)
        if mask is not None and mask.shape[:2] == ids.shape[:2] and mask.dim() == 2:
            self._padding.append((mask == 0).sum())
        else:
            self._padding.append(_repeated_end(ids))


def _repeated_end(ids: torch.Tensor) -> torch.Tensor:
    """Return how many tokens repeat the last token of their row at its end: padding, where there is no mask.

    >>> _repeated_end(torch.tensor([[5, 6, 0, 0], [5, 6, 7, 8]]))
    tensor(2)
    """
    same = (ids == ids[:, -1:]).flip(1).long().cumprod(1).sum(1)
    return torch.where(same > 1, same, 0).sum()
