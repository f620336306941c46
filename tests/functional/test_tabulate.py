"""The table of a model has every module, its parameters once, and the FLOPs of its products."""

from __future__ import annotations

import torch
from torch import Tensor

import piledriver.functional as F
from piledriver.functional.tabulate import rows, tabulate


def test_rows_count_parameters_bytes_and_flops() -> None:
    model = F.Decoder(vocab_size=50, dim=16, depth=2, heads=2, mlp_dim=24)
    tokens = torch.zeros(3, 5, dtype=torch.int64)
    listed = rows(model, tokens)
    leaves = F.tree_leaves(model.init(F.key(0), tokens)["params"])
    assert sum(row.parameters for row in listed) == sum(leaf.numel() for leaf in leaves)
    assert sum(row.bytes for row in listed) == sum(leaf.numel() * 4 for leaf in leaves)
    by_path = {".".join(row.path): row for row in listed}
    assert by_path["layers_1.mlp.gate"].flops == 2 * 3 * 5 * 16 * 24
    assert by_path["layers_1.mlp"].flops == 3 * 2 * 3 * 5 * 16 * 24
    assert by_path["layers_0.attention.query"].own == {"kernel": "float32[16, 2, 8]"}
    assert by_path[""].flops == sum(by_path[f"layers_{i}"].flops for i in range(2)) + 2 * 3 * 5 * 16 * 50
    assert by_path[""].outputs == "float32[3, 5, 50]"


def test_shared_modules_count_once() -> None:
    class Twice(F.Module):
        def __call__(self, x: Tensor) -> Tensor:
            layer = self.child("layer", F.Dense(4))
            return layer(layer(x))

    text = tabulate(Twice(), torch.ones(2, 4))
    assert text.count("layer ") >= 2
    assert "total" in text
    assert " 20 " in text


def test_depth_hides_what_is_deeper_and_nothing_is_allocated() -> None:
    model = F.Decoder(vocab_size=150_000, dim=16_384, depth=3, heads=128, mlp_dim=65_536)
    text = tabulate(model, torch.zeros(8, 4096, dtype=torch.int64, device="meta"), depth=1)
    assert "layers_2" in text
    assert "layers_2.mlp" not in text
    assert "GiB" in text
    assert "P" in text.splitlines()[-2]
