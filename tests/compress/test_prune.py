"""Pruning: criteria against brute force, patterns, and results as ordinary models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piledriver import compress
from piledriver.compress.sparsegpt import importance, smallest, smallest_of_each, sparsegpt
from piledriver.core.errors import UsageError
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import load_folder, save_folder

TOKENS = torch.randint(61, (8, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> Transformer:
    shape = ModelConfig(vocab_size=61, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=96, max_positions=64)
    return Transformer(shape).requires_grad_(False)


def test_wanda_removes_the_smallest_products_of_weight_and_input_norm() -> None:
    x, weight = torch.randn(50, 24) * torch.linspace(0.1, 4, 24), torch.randn(5, 24)
    mask = smallest(importance(weight, x.t() @ x / len(x)), 0.5)
    for row in range(5):
        scores = [float(weight[row, column].abs() * x[:, column].norm()) for column in range(24)]
        expected = sorted(range(24), key=lambda column: scores[column])[:12]
        assert set(mask[row].nonzero()[:, 0].tolist()) == set(expected)


@pytest.mark.parametrize("pattern", [None, (2, 4), (4, 8)])
def test_sparsegpt_is_the_brute_force(pattern: tuple[int, int] | None) -> None:
    make = torch.Generator().manual_seed(0)
    x = torch.randn(200, 64, generator=make) @ torch.randn(64, 64, generator=make)
    weight = torch.randn(6, 64, generator=make)
    hessian = x.t() @ x / len(x)
    found = sparsegpt(weight, hessian, 0.5, pattern=pattern)

    wide = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(64, dtype=torch.float64)
    work = weight.double().clone()
    mask = torch.zeros(6, 64, dtype=torch.bool)
    width = 64 if pattern is None else pattern[1]
    for column in range(64):
        inverse = torch.linalg.inv(wide[column:, column:])
        if column % width == 0:
            # The cost of a weight: its inverse Hessian once the columns before it are fixed.
            costs = [torch.linalg.inv(wide[i:, i:])[0, 0] for i in range(column, column + width)]
            scores = work[:, column : column + width].square() / torch.stack(costs)
            if pattern is None:
                chosen = torch.zeros(scores.numel(), dtype=torch.bool)
                chosen[scores.flatten().argsort(stable=True)[: scores.numel() // 2]] = True
                mask = chosen.view_as(scores)
            else:
                order = scores.argsort(dim=1, stable=True)[:, : width - pattern[0]]
                mask[:, column : column + width] = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)
        kept = work[:, column].masked_fill(mask[:, column], 0.0)
        error = (work[:, column] - kept) / inverse[0, 0]
        work[:, column:] -= error[:, None] * inverse[0]
        work[:, column] = kept
    torch.testing.assert_close(found, work.float(), rtol=1e-3, atol=1e-4)
    size = weight.abs()
    plain = weight.masked_fill(smallest(size, 0.5) if pattern is None else smallest_of_each(size, *pattern), 0.0)
    assert (x @ (found - weight).t()).square().sum() < (x @ (plain - weight).t()).square().sum()


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("sparsity", [0.5, 0.25, "2:4", "4:8"])
def test_a_pruned_model_has_its_zeros_and_is_saved(
    model: Transformer, method: Any, sparsity: float | str, tmp_path: Path
) -> None:
    sparse = compress.prune(model, sparsity, method=method, data=TOKENS, skip=["*.attention.out"])
    for name, layer in sparse.blocks.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        if name.endswith("attention.out"):
            assert torch.equal(layer.weight, model.blocks.get_parameter(f"{name}.weight"))
            continue
        assert float((layer.weight == 0).float().mean()) == pytest.approx(0.25 if sparsity == 0.25 else 0.5, abs=0.01)
        if isinstance(sparsity, str):
            width = int(sparsity[-1])
            groups = (layer.weight == 0).unflatten(1, (-1, width)).sum(-1)  # type: ignore[no-untyped-call]
            assert bool((groups >= width // 2).all())
    again = compress.prune(model, sparsity, method=method, data=TOKENS, skip=["*.attention.out"])
    assert torch.equal(again(TOKENS), sparse(TOKENS))
    save_folder(sparse, tmp_path)
    back = load_folder(tmp_path)
    assert torch.equal(back(TOKENS), sparse(TOKENS))
    assert back.compression[-1]["method"] == method


def test_weights_of_a_layer_can_be_compared_together(model: Transformer) -> None:
    """The smallest half of a layer goes, so that rows lose different shares."""
    sparse = compress.prune(model, 0.5, method="magnitude", compare="layer")
    for name, layer in sparse.blocks.named_modules():
        if isinstance(layer, torch.nn.Linear):
            before, gone = model.blocks.get_parameter(f"{name}.weight").abs(), layer.weight == 0
            assert float(before[gone].max()) <= float(before[~gone].min())
            assert float(gone.float().mean()) == pytest.approx(0.5, abs=0.01)
            assert len(gone.sum(dim=1).unique()) > 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"compare": "layer", "sparsity": "2:4", "method": "magnitude"}, "compare='layer'"),
        ({"sparsity": 1.5}, "sparsity is 1.5"),
        ({"sparsity": "4:2"}, "not a pattern"),
        ({"method": "wanda"}, "needs calibration"),
        ({"method": "best"}, "no method"),
        ({"method": "magnitude", "skip": ["*"]}, "leaves no layer"),
        ({"method": "magnitude", "skip": ["blocks.9.*"]}, "matches no layer"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_named(model: Transformer, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        compress.prune(model, **arguments)


def test_a_quantised_model_is_refused_by_that_reason(model: Transformer) -> None:
    with pytest.raises(UsageError, match="the model is quantised"):
        compress.prune(compress.quantise(model, "w8a16"), method="magnitude")
