"""The optimizer's half of a layout: sharded states, stochastic rounding, local steps, clipping, loss scaling."""

from __future__ import annotations

from typing import Any

import torch

from piledriver.engine.layout import Layout


def make_scaler(layout: Layout, device: torch.device, *, enabled: bool = True, **options: Any) -> Any:
    """Return the loss scaler that fp16 gradients need, None otherwise; `options` are `torch.amp.GradScaler`'s."""
    if layout.precision != "fp16":
        return None
    from piledriver.engine.optimizer.loss_scale import LossScaler, torch_like

    return LossScaler(torch_like(**options), device=device, enabled=enabled)
