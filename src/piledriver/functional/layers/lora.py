"""LoRA: a low-rank correction beside a linear layer (Hu et al., 2021).

Train only the corrections with a mask: `masked(adamw(...), path_matches(r"lora_[ab]$"))`, or split the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from piledriver.functional.frame import Axes, Initialiser
from piledriver.functional.initialisers import he_uniform, lecun_normal, zeros
from piledriver.functional.layers.linear import Dense, promoted
from piledriver.functional.module import Module
from piledriver.functional.tree import Tree

_LECUN = lecun_normal()


class LoRADense(Module):
    """`dense(x) + scale * x @ lora_a @ lora_b`; the parameters of `Dense` keep their names and places.

    `lora_b` starts at zero, so that the layer starts as the one it corrects. The scale is alpha / rank, and 1 without
    an alpha.
    """

    features: int
    rank: int
    alpha: float | None = None
    use_bias: bool = True
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    lora_init: Initialiser = he_uniform()
    kernel_init: Initialiser = _LECUN
    bias_init: Initialiser = zeros
    kernel_axes: Axes | None = None

    def __call__(self, x: Tensor) -> Tensor:
        # The kernel lies where `Dense` would put it, so weights of a plain layer load as they are.
        settings = (self.use_bias, self.dtype, self.param_dtype, self.kernel_init, self.bias_init, self.kernel_axes)
        out = Dense(self.features, *settings).within(self)(x)
        rows, columns = self.kernel_axes or (None, None)
        a = self.param("lora_a", self.lora_init, (x.shape[-1], self.rank), self.param_dtype, (rows, None))
        b = self.param("lora_b", zeros, (self.rank, self.features), self.param_dtype, (None, columns))
        x, a, b = promoted(self.dtype, x, a, b)
        return out + (x @ a) @ b * (1.0 if self.alpha is None else self.alpha / self.rank)


def merge_lora(params: Mapping[str, Any], scale: float = 1.0) -> Tree:
    """Fold every correction into the kernel beside it; the result fits plain `Dense` layers.

    `scale` is the layers' alpha / rank (1 where they have no alpha): the tree does not know it.
    """
    merged: dict[str, Any] = {
        name: merge_lora(value, scale) if isinstance(value, Mapping) else value for name, value in params.items()
    }
    if "lora_a" in merged:
        a, b = merged.pop("lora_a"), merged.pop("lora_b")
        merged["kernel"] = merged["kernel"] + (a @ b * scale).to(merged["kernel"].dtype)
    return Tree(merged)
