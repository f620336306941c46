"""Every activation policy gives the same gradients, bit for bit, and keeps as little as it promises."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piledriver.engine.activations import apply_activation_checkpointing
from piledriver.engine.activations import offload as activations_offload
from piledriver.engine.activations.budget import budget_of
from piledriver.engine.activations.offload import KeepOnHost
from piledriver.engine.activations.saved_bytes import HeldBytes
from piledriver.engine.blocks import blocks_of
from piledriver.engine.errors import EngineError, LayoutError
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh

LAYERS = 4


class Block(nn.Module):
    """Attention and a gated MLP, with dropout, whose randomness a recomputation must repeat."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).movedim(-3, 0).transpose(-3, -2)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + scale * self.dropout(self.out(attended.transpose(-3, -2).flatten(-2)))
        up: Tensor = self.up(x)
        return x + self.dropout(self.down(nn.functional.silu(up) * up.sigmoid()))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(32) for _ in range(LAYERS))
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        out: Tensor = self.head(x)
        return out.square().mean()


BATCH = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))


def train(layout: Layout, model: nn.Module | None = None) -> tuple[list[Tensor], int]:
    """Gradients of the second of two steps, and the bytes held between its forward and its backward."""
    model = Model() if model is None else model
    apply_activation_checkpointing(model, make_mesh(layout, "cpu"))
    torch.manual_seed(3)
    for _ in range(2):
        model.zero_grad()
        with HeldBytes() as held:
            loss = model(BATCH)
        count = held.count()
        loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], count


@functools.cache
def kept() -> tuple[list[Tensor], int]:
    return train(Layout())


def of(**settings: Any) -> tuple[list[Tensor], int]:
    return train(Layout(**settings))


POLICIES = {
    "full": ({"activations": "full"}, 0.03, 0.08),
    "every second": ({"activations": "full", "activation_every": 2}, 0.50, 0.56),
    "selective": ({"activations": "selective"}, 0.30, 0.70),
    "half": ({"activations": "budget", "activation_budget": 0.56}, 0.50, 0.56),
    "a third": ({"activations": "budget", "activation_budget": 0.34}, 0.25, 0.34),
    "all": ({"activations": "budget", "activation_budget": 1.0}, 1.0, 1.0),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_same_gradients_with_fewer_bytes(policy: str) -> None:
    settings, least, most = POLICIES[policy]
    gradients, held = of(**settings)
    expected, everything = kept()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True))
    assert least <= held / everything <= most, held / everything


def test_a_budget_says_what_it_will_keep() -> None:
    model = Model()
    _, held = train(Layout(activations="budget", activation_budget=0.4), model)
    budget = budget_of(model)
    assert budget is not None
    assert len(budget.recomputed) == 3
    # The model holds a little outside its blocks, which no budget is over.
    assert held / kept()[1] == pytest.approx(budget.predicted_share, abs=0.01)
    assert "3 of 4 blocks are recomputed" in str(budget)
    assert budget_of(Model()) is None


def test_names_stay_and_copies_are_their_own() -> None:
    model = Model()
    names, plain = list(model.state_dict()), repr(model)
    apply_activation_checkpointing(model, make_mesh(Layout(activations="full", activation_offload=True), "cpu"))
    assert list(model.state_dict()) == names
    assert repr(model) == plain
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other(BATCH).backward()
    assert other(BATCH).item() == 0.0
    assert model(BATCH).item() != 0.0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("activations", ["keep", "full", "selective"])
def test_saved_tensors_go_to_the_host_once_and_parameters_stay(
    activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations_offload, "SMALLEST_BYTES", 1)
    model = Model()
    gradients, _ = train(Layout(activations=activations, activation_offload=True), model)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, kept()[0], strict=True))
    first, *_, last = blocks_of(model).values()
    assert isinstance(first.forward, KeepOnHost)
    assert not isinstance(last.forward, KeepOnHost)
    # Three blocks in each of two forwards; a recomputed block keeps its input, two of which need a gradient.
    sent, size = first.forward.store.bytes_offloaded, BATCH.numel() * 4
    if activations == "keep":
        one = (kept()[1] / LAYERS) * 6
        assert 0.7 * one < sent < 1.1 * one
    else:
        assert sent == 6 * size


def test_casts_of_parameters_count_as_parameters() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    assert activations_offload.is_of_parameter(weight)
    assert activations_offload.is_of_parameter(weight.t())
    assert activations_offload.is_of_parameter(weight.to(torch.bfloat16).t())
    assert not activations_offload.is_of_parameter(weight * 2)
    assert not activations_offload.is_of_parameter(torch.ones(2))


class Cache:
    """What Hugging Face gives to blocks, in training too."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def get_seq_length(self) -> int:
        return len(self.held)

    def update(self, x: Tensor) -> Tensor:
        self.held.append(x)
        return torch.stack(self.held).sum(0)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.inner(x)
        return (x if cache is None else cache.update(x)).sin()


def test_a_recomputed_block_does_not_add_to_a_cache_twice() -> None:
    model = nn.ModuleList(Remembers() for _ in range(2))
    found = []
    for layout in (Layout(), Layout(activations="full")):
        apply_activation_checkpointing(model, make_mesh(layout, "cpu"))
        model.zero_grad()
        model[1](model[0](BATCH, Cache()), cache=Cache()).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    full = Cache()
    full.update(torch.ones(()))
    with pytest.raises(EngineError, match="train with use_cache=False"):
        model[0](BATCH, full)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(LayoutError, match="Linear has no repeated blocks"):
        apply_activation_checkpointing(nn.Linear(2, 2), make_mesh(Layout(activations="full"), "cpu"))
    # Evaluation is not touched.
    model = apply_activation_checkpointing(Model(), make_mesh(Layout(activations="full"), "cpu")).eval()
    with torch.no_grad():
        assert not model(BATCH).requires_grad
