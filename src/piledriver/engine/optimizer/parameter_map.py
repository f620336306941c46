"""Map parameters to their replacements in a layout, so that optimizers made before can be updated."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class ParameterMap:
    """Old parameters to new ones. Weak: the old ones must be freed once no optimizer refers to them."""

    def __init__(self) -> None:
        self.replaced: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
        self.offstage: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()
        """Parameters that only other pipeline stages hold."""

    def record(self, model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
        """Compare the parameters of a model with those it had before a layout was applied."""
        now = dict(model.named_parameters())
        for name, old in before.items():
            if name not in now:
                self.offstage[old] = True
            elif now[name] is not old:
                self.replaced[old] = now[name]

    def __deepcopy__(self, memo: Any) -> ParameterMap:
        # Keyed by identity, which a copy does not share.
        return ParameterMap()

    def __reduce__(self) -> tuple[Any, ...]:
        return ParameterMap, ()


def swap_parameters(optimizer: torch.optim.Optimizer, parameters: ParameterMap) -> None:
    """Put each new parameter where the old one was in the groups of an optimizer, with its state if there is one."""
    replaced, offstage = parameters.replaced, parameters.offstage
    if not replaced and not offstage:
        return
    for group in optimizer.param_groups:
        held = [parameter for parameter in group["params"] if parameter not in offstage]
        group["params"] = [replaced.get(parameter, parameter) for parameter in held]
    for old in [known for known in optimizer.state if known in offstage]:
        del optimizer.state[old]
    for old in [known for known in optimizer.state if known in replaced]:
        new, state = replaced[old], optimizer.state.pop(old)
        optimizer.state[new] = {key: _sharded_like(new, old, value) for key, value in state.items()}


def _sharded_like(new: Tensor, old: Tensor, value: Any) -> Any:
    """Shard an elementwise state like its parameter; return counters as they are."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(new, DTensor):
        return value
    if value.shape != old.shape or value.dim() == 0:
        return value
    return distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
