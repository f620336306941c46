# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
"""The column loop as one GPU kernel: a program keeps all columns of some rows in registers."""

from __future__ import annotations

from torch import Tensor

from piledriver.kernels.column_loop.reference import ColumnStep
from piledriver.kernels.registry import TritonKernel

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_ROWS = 16


if triton is not None:

    @triton.jit
    def _column_kernel(
        part,
        changes,
        scales,
        zeros,
        kept,
        out,
        errors,
        rows,
        count,
        low,
        high,
        removes: tl.constexpr,
        has_zeros: tl.constexpr,
        width: tl.constexpr,
        block: tl.constexpr,
    ):
        row = tl.program_id(0) * block + tl.arange(0, block)
        inside = row < rows
        place = tl.arange(0, width)
        tile = tl.load(
            part + place[:, None] * rows + row[None, :], mask=(place < count)[:, None] & inside[None, :], other=0.0
        )
        for index in range(count):
            here = index * rows + row
            column = tl.sum(tl.where(place[:, None] == index, tile, 0.0), axis=0)
            if removes:
                stored = column * tl.load(kept + here, mask=inside, other=0.0)
            else:
                scale = tl.load(scales + here, mask=inside, other=1.0)
                code = tl.div_rn(column, scale)
                # Adding 1.5 * 2^23 leaves no bits for a fraction: the nearest integer, ties to even, as torch rounds.
                code = tl.minimum(tl.maximum(code, -65536.0), 65536.0)
                code = (code + 12582912.0) - 12582912.0
                if has_zeros:
                    zero = tl.load(zeros + here, mask=inside, other=0.0)
                    code = tl.minimum(tl.maximum(code + zero, low), high) - zero
                else:
                    code = tl.minimum(tl.maximum(code, low), high)
                stored = code * scale
            error = column - stored
            tl.store(out + here, stored, mask=inside)
            tl.store(errors + here, error, mask=inside)
            change = tl.load(changes + index * width + place, mask=place > index, other=0.0)
            tile -= change[:, None] * error[None, :]


class TritonColumnLoop(TritonKernel):
    """The loop of a part in one launch."""

    def run(self, part: Tensor, changes: Tensor, step: ColumnStep, out: Tensor, errors: Tensor) -> None:
        """See `ReferenceColumnLoop.run`; `part` is left as it is."""
        count, rows = part.shape
        width = max(16, triton.next_power_of_2(count))
        if changes.shape != (width, width) or not changes.is_contiguous():
            padded = changes.new_zeros(width, width)
            padded[:count, :count] = changes
            changes = padded
        removes = step.kept is not None
        grid = step.kept if removes else step.scales
        _column_kernel[(triton.cdiv(rows, _ROWS),)](
            part,
            changes,
            grid,
            grid if step.zeros is None else step.zeros,
            grid,
            out,
            errors,
            rows,
            count,
            float(step.low),
            float(step.high),
            removes=removes,
            has_zeros=step.zeros is not None,
            width=width,
            block=_ROWS,
            num_warps=4,
        )
