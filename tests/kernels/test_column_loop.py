"""The column loop of GPTQ and SparseGPT: the GPU kernel does what the loop over columns does."""

from __future__ import annotations

import pytest
import torch

from piledriver.kernels.column_loop.reference import ColumnStep, ReferenceColumnLoop
from piledriver.kernels.registry import HAS_TRITON
from tests.engine.gpu import ON_GPU
from tests.kernels.interpreter import interpret

SCRIPT = """
import torch
from tests.kernels.test_column_loop import compare
from piledriver.kernels.column_loop.triton import TritonColumnLoop
for count in (7, 16, 24):
    compare(TritonColumnLoop(), count=count, rows=21, device="cpu")
"""


def compare(kernel: object, *, count: int, rows: int, device: str) -> None:
    """Run a kernel and the reference on the same part, for all kinds of steps."""
    random = torch.Generator().manual_seed(count)
    part = torch.randn(count, rows, generator=random)
    changes = (0.3 * torch.randn(count, count, generator=random)).triu(1)
    scales = 0.2 + torch.rand(count, rows, generator=random)
    zeros = torch.randint(16, (count, rows), generator=random).float()
    kept = (torch.rand(count, rows, generator=random) < 0.5).float()
    steps = {
        "int4": ColumnStep(scales, low=-8.0, high=7.0),
        "int4 with zero points": ColumnStep(scales, zeros, low=0.0, high=15.0),
        "int8": ColumnStep(scales / 50, low=-127.0, high=127.0),
        "removed": ColumnStep(kept=kept),
    }
    for name, step in steps.items():
        here = ColumnStep(*(value.to(device) if isinstance(value, torch.Tensor) else value for value in step))
        want, got = [torch.empty(2, count, rows) for _ in range(2)]
        got = got.to(device)
        ReferenceColumnLoop().run(part.clone(), changes, step, want[0], want[1])
        kernel.run(part.to(device), changes.to(device), here, got[0], got[1])  # type: ignore[attr-defined]
        # A value on the edge of two codes may fall to either side, and all columns of its row after it differ then.
        wrong = ((got.cpu() - want).abs() > 1e-4).any(dim=0).any(dim=0).float().mean()
        assert float(wrong) <= 0.05, (name, float(wrong))


def test_an_error_changes_the_columns_after_it() -> None:
    """Two columns by hand: 0.4 is stored as 0, and the next column takes half of the error."""
    part, changes = torch.tensor([[0.4], [1.4]]), torch.tensor([[0.0, 0.5], [0.0, 0.0]])
    out, errors = torch.empty(2, 1), torch.empty(2, 1)
    ReferenceColumnLoop().run(part, changes, ColumnStep(torch.ones(2, 1), low=-8.0, high=7.0), out, errors)
    assert out.flatten().tolist() == [0.0, 1.0]
    assert errors.flatten().tolist() == pytest.approx([0.4, 0.2])


def test_the_kernel_equals_the_loop_in_the_interpreter() -> None:
    """All kinds of steps, numbers of columns that are no power of two."""
    interpret(SCRIPT)


class TestOnGpu:
    """The compiled kernel, on parts as wide as those of GPTQ."""

    pytestmark = ON_GPU

    @pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
    @pytest.mark.parametrize("count", [24, 128])
    def test_the_kernel_equals_the_loop(self, count: int) -> None:
        """All kinds of steps."""
        from piledriver.kernels.column_loop.triton import TritonColumnLoop

        compare(TritonColumnLoop(), count=count, rows=200, device="cuda")
