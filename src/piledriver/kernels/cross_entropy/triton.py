# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
"""Logits to gradient in one GPU kernel, in place: each row is read twice (the second time from cache), written once.

torch's compiler makes two kernels of the formula and reads from memory each time. Triton comes with torch's GPU builds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.registry import TritonKernel

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK = 4096
_WARPS = 16

if triton is not None:

    @triton.jit
    def _rows_to_gradients(
        logits,
        targets,
        losses,
        squares,
        stride,
        ignore_index,
        z_loss,
        cap,
        vocab: tl.constexpr,
        capped: tl.constexpr,
        block: tl.constexpr,
    ):
        """One program per row: an online softmax, then the gradient over the logits."""
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(targets + row)
        line = logits + row * stride
        lanes = tl.arange(0, block)
        if target == ignore_index:
            for begin in range(0, vocab, block):
                tl.store(line + begin + lanes, 0.0, mask=begin + lanes < vocab)
            tl.store(losses + row, 0.0)
            tl.store(squares + row, 0.0)
        else:
            # Read before the stores below overwrite it; the reductions between are a barrier.
            # A target outside the vocabulary makes the loss NaN: reading there would return any number.
            known = (target >= 0) & (target < vocab)
            goal = tl.load(line + target, mask=known, other=float("nan")).to(tl.float32)
            if capped:
                goal = cap * (2.0 * tl.sigmoid(2.0 * goal / cap) - 1.0)
            # One running softmax per lane, combined at the end: a reduction over lanes waits for all of them.
            largest = tl.full((block,), -1e30, tl.float32)
            total = tl.zeros((block,), tl.float32)
            for begin in range(0, vocab, block):
                inside = begin + lanes < vocab
                x = tl.load(line + begin + lanes, mask=inside, other=-float("inf")).to(tl.float32)
                if capped:
                    x = tl.where(inside, cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0), -float("inf"))
                new = tl.maximum(largest, x)
                total = total * tl.exp(largest - new) + tl.exp(x - new)
                largest = new
            most = tl.max(largest, axis=0)
            log_z = most + tl.log(tl.sum(total * tl.exp(largest - most), axis=0))
            tl.store(losses + row, log_z - goal)
            tl.store(squares + row, log_z * log_z)
            slope = 1.0 + 2.0 * z_loss * log_z
            for begin in range(0, vocab, block):
                inside = begin + lanes < vocab
                x = tl.load(line + begin + lanes, mask=inside, other=0.0).to(tl.float32)
                if capped:
                    x = cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)
                gradient = tl.exp(x - log_z) * slope - tl.where(begin + lanes == target, 1.0, 0.0)
                if capped:
                    gradient = gradient * (1.0 - (x / cap) * (x / cap))
                tl.store(line + begin + lanes, gradient.to(logits.dtype.element_ty), mask=inside)


class TritonCrossEntropy(TritonKernel):
    """One program per row; the gradient replaces the logits."""

    def __call__(
        self, logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return what `ReferenceCrossEntropy` returns."""
        rows, vocab = logits.shape
        losses, squares = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
        _rows_to_gradients[(rows,)](
            logits,
            targets,
            losses,
            squares,
            logits.stride(0),
            ignore_index,
            z_loss,
            1.0 if softcap is None else softcap,
            vocab=vocab,
            capped=softcap is not None,
            block=_BLOCK,
            num_warps=_WARPS,
        )
        loss, square = losses.sum(), squares.sum()
        return logits, torch.stack((loss + z_loss * square, loss, square))
