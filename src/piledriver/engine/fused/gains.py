"""What a layout would change in a model that is trained without one, in one line."""

from __future__ import annotations

from torch import nn

from piledriver.engine.blocks import blocks_of
from piledriver.engine.fused.experts import is_experts
from piledriver.engine.fused.gated_mlp import is_gated_mlp
from piledriver.engine.fused.norms import is_norm
from piledriver.engine.fused.output_layer import output_layers


def gains_of(model: nn.Module) -> str | None:
    """Return what `Layout(precision="bf16")` would do to a model on a GPU; None if it would do nothing.

    >>> gains_of(nn.Linear(2, 2)) is None
    True
    >>> gains_of(nn.Sequential(nn.Embedding(50, 8), *(nn.LayerNorm(8) for _ in range(2)), nn.Linear(8, 50)))
    'fuse 2 norms, and compute the loss without its logits (200 bytes or more per token)'
    """
    blocks = len(blocks_of(model))
    norms = sum(1 for module in model.modules() if is_norm(module))
    mlps = sum(1 for module in model.modules() if is_gated_mlp(module))
    experts = sum(1 for module in model.modules() if is_experts(module))
    words = max((getattr(layer, "out_features", 0) for layer in output_layers(model).values()), default=0)
    counted = ((norms, "norms"), (mlps, "gated MLPs"), (experts, "mixtures of experts"))
    gains = [f"compile {blocks} blocks"] if blocks else []
    if fused := [f"{count} {what}" for count, what in counted if count]:
        gains.append(f"fuse {' and '.join(fused)}")
    if words:
        # An fp32 copy of the logits is the least that a loss of theirs holds.
        gains.append(f"compute the loss without its logits ({4 * words:,} bytes or more per token)")
    return ", and ".join(filter(None, [", ".join(gains[:-1]), gains[-1]])) if gains else None
