"""The private API of torch that kernels use, in one place: look here first when torch is upgraded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
flash_attention_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def scaled_mm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, out: torch.dtype, *, fast: bool
) -> Tensor:
    """Return left @ right of fp8 matrices with their scales undone."""
    return torch._scaled_mm(left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=out, use_fast_accum=fast)


def graph_is_kept() -> bool:
    """Return whether the backward pass that runs now may run again (`retain_graph`, `create_graph`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def compiled_block_mask(mask_mod: Any, batch: int | None, length: int, device: torch.device) -> BlockMask:
    """Return the block mask of `mask_mod`, evaluated by a compiled kernel on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask

    compile_it = device.type == "cuda"
    return create_block_mask(mask_mod, batch, None, length, length, device=str(device), _compile=compile_it)
