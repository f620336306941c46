"""fp8 layers in a model: names and keys untouched, losses and activation checkpointing as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piledriver.engine import Layout
from piledriver.engine.activations import apply_activation_checkpointing
from piledriver.engine.fp8.apply import fp8_layers, use_fp8_layers
from piledriver.engine.mesh import make_mesh
from piledriver.engine.precision import apply_precision
from piledriver.kernels.fp8.reference import ReferenceFp8
from piledriver.models import LatentAttentionConfig, ModelConfig, MoEConfig, Transformer
from piledriver.optim import SplitMasterAdamW

SHAPE = ModelConfig(vocab_size=64, dim=32, layers=2, heads=2, mlp_dim=64, max_positions=16)


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "fp8-pure"])
def test_keys_and_names_stay_and_the_head_is_left_alone(precision: str) -> None:
    model = Transformer(ModelConfig(**{**vars(SHAPE), "tied": False}))
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    assert use_fp8_layers(model, Layout(precision=precision), worth=0) is model  # type: ignore[arg-type]
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == names
    whole = () if precision == "fp8-rowwise" else ("mlp",)
    layers = ("attention.qkv", "attention.out", *whole, "mlp.gate_up", "mlp.down")
    assert fp8_layers(model) == [f"blocks.{block}.{layer}" for block in "01" for layer in layers]


def test_layers_that_would_lose_are_left_alone() -> None:
    config = ModelConfig(vocab_size=64, dim=768, layers=1, heads=12, mlp_dim=2048, max_positions=16)
    model = use_fp8_layers(Transformer(config), Layout(precision="fp8"))
    assert fp8_layers(model) == ["blocks.0.mlp", "blocks.0.mlp.gate_up"]


def test_latent_attention_and_shared_experts_are_layers_like_others() -> None:
    config = ModelConfig(
        vocab_size=64,
        dim=32,
        layers=2,
        heads=2,
        head_dim=32,
        max_positions=16,
        latent=LatentAttentionConfig(kv_rank=32, rope_dim=16, value_dim=16, q_rank=32),
        moe=MoEConfig(experts=4, expert_dim=32, shared_dim=32, shared_gate=True, dense_layers=(0,)),
    )
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    exact = Transformer(config)(tokens, tokens).loss
    model = use_fp8_layers(Transformer(config), Layout(precision="fp8"), worth=0)
    attention = ("q_a", "q_b", "kv_a", "kv_b", "out")
    expected = {f"blocks.{block}.attention.{name}" for block in "01" for name in attention}
    expected |= {f"blocks.{mlp}{name}" for mlp in ("0.mlp", "1.shared_mlp") for name in ("", ".gate_up", ".down")}
    assert set(fp8_layers(model)) == expected
    loss = model(tokens, tokens).loss
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.05)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "fp8-pure"])
def test_a_model_learns_as_without(precision: str) -> None:
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1))
    losses = {}
    for name in ("fp32", precision):
        layout = Layout(precision=name)  # type: ignore[arg-type]
        model = Transformer(SHAPE)
        if layout.has_bf16_weights:
            apply_precision(model, make_mesh(layout, "cpu"))
        use_fp8_layers(model, layout, worth=0)
        optimizer = SplitMasterAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.999), weight_decay=0.01)
        for _ in range(30):
            sums = model(tokens[:, :-1], tokens[:, 1:])
            loss = sums.total / sums.tokens
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[name] = float(loss.detach())
    assert losses["fp32"] < 3.0
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.05)


def test_recomputed_activations_give_the_same_gradients() -> None:
    model = use_fp8_layers(Transformer(SHAPE), Layout(precision="fp8"), worth=0)
    x = torch.randn(2, 8, 32)
    block = model.blocks["0"].mlp
    plain = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
    again = torch.autograd.grad(
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).square().sum(), list(block.parameters())
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise"])
def test_selective_keeps_the_products(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `selective` recomputes are norms and elementwise work, not the layers: their products are taken once."""
    taken: list[bool] = []

    product = ReferenceFp8.product

    def counted(*args: Any, fast: bool = False) -> Tensor:
        taken.append(fast)
        return product(*args, fast=fast)

    monkeypatch.setattr(ReferenceFp8, "product", counted)
    counts, gradients = {}, {}
    for activations in ("keep", "selective", "full"):
        layout = Layout(precision=precision, activations=activations)  # type: ignore[arg-type]
        model = use_fp8_layers(Transformer(SHAPE), layout, worth=0)
        apply_activation_checkpointing(model, make_mesh(layout, "cpu"))
        taken.clear()
        model(torch.arange(16).view(1, 16), torch.arange(16).view(1, 16)).total.backward()
        # Products of the forward are those that may sum in fewer bits.
        counts[activations] = sum(taken)
        gradients[activations] = [parameter.grad for parameter in model.parameters()]
    assert counts["selective"] == counts["keep"] > 0
    assert counts["full"] == 2 * counts["keep"]
    for one in ("selective", "full"):
        assert all(torch.equal(a, b) for a, b in zip(gradients[one], gradients["keep"], strict=True))


def test_autocast_decides_the_dtype() -> None:
    layer = use_fp8_layers(nn.Sequential(nn.Linear(32, 16)), Layout(precision="fp8"), worth=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(4, 32)).dtype == torch.bfloat16
    assert layer(torch.randn(4, 32)).dtype == torch.float32
