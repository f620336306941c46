"""The formulas of our blocks agree with traces on fake tensors; any module with an example input can be traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from piledriver.kernels.attention import Mask
from piledriver.models.attention.rotary import Rotary
from piledriver.models.block import Block
from piledriver.models.config import ModelConfig
from piledriver.plan import PlanError, trace_module
from piledriver.plan.blocks.setting import BlockSetting, Traits
from piledriver.plan.blocks.transformer import block_cost

CONFIG = ModelConfig(vocab_size=256, dim=128, layers=1, heads=4, kv_heads=2, mlp_dim=256, max_positions=1024)


class OneBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.block = Block(CONFIG, 0)
        self.rotary = Rotary(CONFIG)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.rotary(x.shape[1], None), Mask())[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_block_keeps_what_the_partitioner_keeps(dtype: torch.dtype) -> None:
    x = torch.empty(2, 1024, 128, dtype=dtype, device="meta", requires_grad=True)
    traced = trace_module(OneBlock(), x, compiled=True)
    precision = "fp32" if dtype == torch.float32 else "bf16"
    # A CPU has no fused gate, and its attention returns heads before time, which the projection copies. The block's
    # input is given, so that the trace does not count it.
    setting = BlockSetting(sequences=2, length=1024, precision=precision, traits=Traits(fused_gate=False))
    cost = block_cost(CONFIG, None, setting)
    by_name = {one.name: one.bytes for one in cost.kept}
    said = cost.kept_bytes - by_name["block input"] + by_name["attention output"]
    assert traced.kept_bytes == pytest.approx(said, rel=0.01)


def test_a_block_computes_the_counted_products() -> None:
    x = torch.empty(2, 1024, 128, device="meta", requires_grad=True)
    traced = trace_module(OneBlock(), x)
    setting = BlockSetting(sequences=2, length=1024, precision="fp32", compiled=False)
    cost = block_cost(CONFIG, None, setting)
    said = sum(one.flops for one in (*cost.forward, *cost.backward) if one.kind == "matmul")
    assert traced.matmul_flops == pytest.approx(said)


def test_any_module_keeps_what_autograd_saves() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    cost = trace_module(model, torch.ones(32, 8))
    # The output of the activation, once: the input is given, and both products keep views of these.
    assert cost.kept_bytes == 32 * 16 * 4
    assert cost.parameters == 8 * 16 + 16 + 16 * 4 + 4
    assert cost.matmul_flops == 2 * 32 * (2 * 8 * 16 + 3 * 16 * 4)


def test_a_module_that_reads_values_is_one_line() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight if bool(x.sum() > 0) else x

    with pytest.raises(PlanError, match="Reads cannot be traced") as error:
        trace_module(Reads(), torch.ones(2))
    assert "\n" not in str(error.value)
