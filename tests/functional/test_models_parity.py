"""The functional decoder equals the decoder of `models/` with the same weights: logits, loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import piledriver.functional as F

models = pytest.importorskip("piledriver.models")

TOKENS = F.randint(F.key(0), (2, 9), 0, 31)


def moved(model: Any) -> F.Tree:
    """The weights of `models.Transformer` as parameters of the functional decoder: views, transposed."""
    config, weights = model.config, {name: value.detach() for name, value in model.named_parameters()}
    leaves: dict[str, Tensor] = {"embed.embedding": weights["embedding.weight"], "norm.scale": weights["norm.weight"]}
    if not config.tied:
        leaves["head.kernel"] = weights["head.weight"].T
    group = config.heads // config.kv_heads
    for i in range(config.layers):
        ours, theirs = f"layers_{i}", f"blocks.{i}"
        # Their rows come by key head: its queries, then its key, then its value.
        rows = weights[f"{theirs}.attention.qkv.weight"].view(config.kv_heads, group + 2, config.head_dim, config.dim)
        parts = {"query": rows[:, :group].flatten(0, 1), "key": rows[:, group], "value": rows[:, group + 1]}
        for name, part in parts.items():
            leaves[f"{ours}.attention.{name}.kernel"] = part.permute(2, 0, 1)
        out = weights[f"{theirs}.attention.out.weight"]
        leaves[f"{ours}.attention.out.kernel"] = out.T.reshape(config.heads, config.head_dim, config.dim)
        pairs = weights[f"{theirs}.mlp.gate_up.weight"].view(-1, 2, config.gate_block, config.dim)
        leaves[f"{ours}.mlp.gate.kernel"] = pairs[:, 0].reshape(config.mlp_dim, config.dim).T
        leaves[f"{ours}.mlp.up.kernel"] = pairs[:, 1].reshape(config.mlp_dim, config.dim).T
        leaves[f"{ours}.mlp.down.kernel"] = weights[f"{theirs}.mlp.down.weight"].T
        for name in ("attention_norm", "mlp_norm"):
            leaves[f"{ours}.{name}.scale"] = weights[f"{theirs}.{name}.weight"]
    return F.unflatten(leaves)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_decoder_equals_the_models_room(kv_heads: int, tied: bool) -> None:
    config = models.ModelConfig(vocab_size=31, dim=16, layers=2, heads=4, kv_heads=kv_heads, mlp_dim=24, tied=tied)
    theirs = models.Transformer(config, seed=3)
    ours = F.Decoder(31, 16, 2, 4, 24, kv_heads=kv_heads, tie_embeddings=tied)
    params = moved(theirs)
    assert list(F.flatten(params)) == list(F.flatten(ours.init(F.key(0), TOKENS)["params"]))
    torch.testing.assert_close(ours.apply({"params": params}, TOKENS), theirs(TOKENS), rtol=1e-5, atol=1e-5)
    sums = theirs(TOKENS[:, :-1], targets=TOKENS[:, 1:])
    expected = sums.total / sums.tokens
    expected.backward()

    def loss(params: F.Tree) -> Tensor:
        return F.cross_entropy(ours.apply({"params": params}, TOKENS[:, :-1]), TOKENS[:, 1:])

    value, grads = F.value_and_grad(loss)(params)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-5, atol=1e-5)
    # The gradients through the same mapping: theirs, put in the places of the weights.
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    for path, gradient in F.flatten(moved(theirs)).items():
        torch.testing.assert_close(grads.at(path), gradient, rtol=1e-4, atol=1e-5)
