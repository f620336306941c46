"""The table of a model has every module, its parameters once, and the FLOPs of its products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piledriver.functional as F
from piledriver.functional.tabulate import rows, tabulate

TOKENS = torch.zeros(3, 5, dtype=torch.int64)


def small(**changes: Any) -> F.Decoder:
    return F.Decoder(vocab_size=50, dim=16, depth=2, heads=2, mlp_dim=24, **changes)


class Twice(F.Module):
    def __call__(self, x: Tensor) -> Tensor:
        layer = self.child("layer", F.Dense(4))
        return layer(layer(x))


def test_rows_count_parameters_bytes_and_flops() -> None:
    listed = rows(small(), TOKENS)
    leaves = F.tree_leaves(small().init(F.key(0), TOKENS)["params"])
    assert sum(row.parameters for row in listed) == sum(leaf.numel() for leaf in leaves)
    assert sum(row.bytes for row in listed) == sum(leaf.numel() * 4 for leaf in leaves)
    by_path = {".".join(row.path): row for row in listed}
    assert by_path["layers_1.mlp.gate"].flops == 2 * 3 * 5 * 16 * 24
    assert by_path["layers_1.mlp"].flops == 3 * 2 * 3 * 5 * 16 * 24
    # Four projections, the scores and the mixing of the values.
    assert by_path["layers_0.attention"].flops == 4 * 2 * 3 * 5 * 16 * 16 + 2 * 2 * 3 * 5 * 5 * 16
    assert by_path["layers_0.attention.query"].own == {"kernel": "float32[16, 2, 8]"}
    assert by_path[""].flops == sum(by_path[f"layers_{i}"].flops for i in range(2)) + 2 * 3 * 5 * 16 * 50
    assert by_path[""].outputs == "float32[3, 5, 50]"


@pytest.mark.parametrize(
    ("module", "example"),
    [
        (Twice(), torch.ones(2, 4)),
        (small(scan=True), TOKENS),
        (small(scan=True, remat=True), TOKENS),
        (F.Scanned(F.Vmapped(F.Dense(4), 3), 2), torch.ones(3, 5, 4)),
        (F.from_torch(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4))), torch.ones(2, 4)),
        (F.LoRADense(5, 2), torch.ones(2, 4)),
    ],
    ids=["shared", "scanned", "scanned and recomputed", "stacks of stacks", "torch", "lora"],
)
def test_every_parameter_counts_once(module: F.Module, example: Tensor) -> None:
    leaves = F.tree_leaves(module.init(F.key(0), example)["params"])
    listed = [row for row in rows(module, example) if not row.is_again]
    assert sum(row.parameters for row in listed) == sum(leaf.numel() for leaf in leaves)


def test_stacked_layers_cost_what_they_would_one_by_one() -> None:
    assert rows(small(scan=True), TOKENS)[0].flops == rows(small(), TOKENS)[0].flops
    stacks = rows(F.Scanned(F.Vmapped(F.Dense(4), 3), 2), torch.ones(3, 5, 4))
    assert {row.flops for row in stacks} == {2 * 3 * 2 * 5 * 4 * 4}


def test_shared_modules_are_shown_again_without_a_count() -> None:
    text = tabulate(Twice(), torch.ones(2, 4))
    assert text.count("layer ") == 2
    assert text.count("the same") == 1
    assert text.splitlines()[-1].split()[:2] == ["total", "20"]


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_and_folds_no_name(width: int) -> None:
    lines = tabulate(small(), TOKENS, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == len(rows(small(), TOKENS)) + 6
    assert any(line.startswith("   attention_norm ") for line in lines)


def test_depth_hides_what_is_deeper_and_nothing_is_allocated() -> None:
    model = F.Decoder(vocab_size=150_000, dim=16_384, depth=3, heads=128, mlp_dim=65_536)
    text = tabulate(model, torch.zeros(8, 4096, dtype=torch.int64, device="meta"), depth=1)
    assert "layers_2" in text
    assert "mlp" not in text
    assert "GiB" in text
    assert text.splitlines()[-1].endswith(" P")
