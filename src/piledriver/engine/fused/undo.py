"""Undo fusing: give modules their own forwards back and remove the hooks."""

from __future__ import annotations

from torch import nn

from piledriver.engine.fused.attention import forget_packing, uninstall_attention
from piledriver.engine.fused.report import pop_report
from piledriver.engine.fused.residual import CastInput
from piledriver.engine.torch_private import remove_pre_hooks


def unfuse(model: nn.Module) -> None:
    """Make a model compute by its own code again, in place."""
    if pop_report(model) is None:
        return
    uninstall_attention(model)
    forget_packing(model)
    for module in model.modules():
        forward = vars(module).get("forward")
        if getattr(getattr(forward, "__func__", None), "is_fused", False):
            del module.forward
        remove_pre_hooks(module, CastInput)
