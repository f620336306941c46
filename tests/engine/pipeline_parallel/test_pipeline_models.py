"""Pipelines of models that are not ours, and what happens when something does not fit or somebody dies."""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.core.errors import UsageError
from piledriver.engine import Layout, LayoutError
from piledriver.engine.apply import apply
from piledriver.engine.blocks import blocks_of
from piledriver.engine.errors import EngineError
from piledriver.engine.layout import Schedule
from piledriver.engine.mesh import make_mesh
from piledriver.engine.pipeline_parallel import split_stages
from piledriver.engine.pipeline_parallel.runner import Pipeline, evaluate_batch, run_batch
from piledriver.engine.pipeline_parallel.split import made_stages
from piledriver.engine.pipeline_parallel.units import units_of
from piledriver.engine.shards.full_state_dict import full_state_dict
from piledriver.engine.state import state_of
from piledriver.models import ModelConfig, Transformer
from piledriver.runtime.errors import LostPeerError
from tests.checkpoint.processes import run as on_ranks

CPU = torch.device("cpu")


def _stack() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(16, 8), *(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)), nn.Linear(8, 16)
    )


def _mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _batch(rows: int, time: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 16, (rows, time + 1), generator=torch.Generator().manual_seed(rows))
    targets = tokens[:, 1:].clone()
    targets[: rows // 2, : time // 2] = -100
    return tokens[:, :-1].contiguous(), targets


def _user_stack() -> None:
    """A chain of modules with a loss function that gives a mean, on batches of several shapes."""
    layout = Layout(pp=2, schedule="interleaved-1f1b", microbatches=4)
    mesh = make_mesh(layout, "cpu")
    whole, model = _stack(), _stack()
    model = split_stages(model, mesh)
    pipeline = Pipeline(model, mesh, device=CPU)
    want = torch.optim.SGD(whole.parameters(), lr=0.5)
    got = torch.optim.SGD(model.parameters(), lr=0.5)
    for rows, length in ((8, 6), (8, 5), (6, 6), (3, 6), (8, 6)):
        x, y = _batch(rows, length)
        expected = _mean(whole(x), y)
        torch.testing.assert_close(evaluate_batch(pipeline, x, y, _mean), expected.detach())
        expected.backward()
        torch.testing.assert_close(run_batch(pipeline, x, y, _mean), expected.detach())
        for optimizer in (want, got):
            optimizer.step()
            optimizer.zero_grad()
    joined = full_state_dict(model, mesh)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(joined[name], value)
    with pytest.raises(UsageError, match="no loss of its own"):
        run_batch(pipeline, x, y)


HUGGING_FACE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip


def _hugging_face() -> None:
    """A decoder of Hugging Face's, with tied weights, capped logits, padding and windows in its last layers."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    windows: dict[str, Any] = {"sliding_window": 3, "layer_types": kinds, "attn_implementation": "eager"}
    config = Gemma2Config(**HUGGING_FACE, final_logit_softcapping=0.5, **windows)
    torch.manual_seed(0)
    whole = Gemma2ForCausalLM(config)
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    layout = Layout(pp=2, microbatches=2)
    mesh = make_mesh(layout, "cpu")
    model = split_stages(Gemma2ForCausalLM(config), mesh)
    made_stages(model)
    missing, _ = model.load_state_dict(state, strict=False)
    assert not missing
    pipeline = Pipeline(model, mesh, device=CPU)
    x, _ = _batch(4, 8)
    attention = torch.ones_like(x)
    attention[1, :3] = 0
    labels = torch.where(attention == 1, x, -100)
    for _ in range(2):
        want = torch.optim.SGD(whole.parameters(), lr=0.1)
        got = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = whole(x, attention_mask=attention, labels=labels, use_cache=False).loss
        loss.backward()
        piped = run_batch(pipeline, x, labels, context={"attention_mask": attention, "use_cache": False})
        torch.testing.assert_close(piped, loss.detach(), rtol=1e-5, atol=1e-6)
        for optimizer in (want, got):
            optimizer.step()
            optimizer.zero_grad()
    joined = full_state_dict(model, mesh)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(joined[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def _what_does_not_fit() -> None:
    """Every rank is told which stage rejects its inputs; no rank hangs."""
    layout = Layout(pp=2, microbatches=2)
    mesh = make_mesh(layout, "cpu")
    wrong = split_stages(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(5, 4), nn.Linear(4, 4)), mesh)
    pipeline = Pipeline(wrong, mesh, device=CPU)
    with pytest.raises(EngineError, match=r"stage 1 rejects the outputs of the stage before it \(\(2, 4\)\)"):
        run_batch(pipeline, torch.zeros(4, 4), torch.zeros(4, 4), F.mse_loss)
    layout = Layout(pp=2, microbatches=2, debug=True)
    mesh = make_mesh(layout, "cpu")
    pipeline = Pipeline(split_stages(_stack(), mesh), mesh, device=CPU)
    x, y = _batch(4 + dist.get_rank(), 4)
    with pytest.raises(EngineError, match="ranks 0 and 1 of one pp group were given different batches"):
        run_batch(pipeline, x, y, _mean)


def _documents() -> None:
    """Packed documents travel to every stage."""
    config = ModelConfig(vocab_size=16, dim=16, layers=3, heads=2, mlp_dim=32, max_positions=16)
    from piledriver.models.attention.masks import make_masks

    whole = Transformer(config, seed=1)
    layout = Layout(pp=2, microbatches=2)
    mesh = make_mesh(layout, "cpu")
    pipeline = Pipeline(split_stages(Transformer(config, seed=1), mesh), mesh, device=CPU)
    x, y = _batch(4, 8)
    ids = (torch.arange(8) > 4).long().expand(4, 8)
    sums = whole(x, y, masks=make_masks(config, 8, "cpu", ids))
    got = evaluate_batch(pipeline, x, y, context={"document_ids": ids})
    torch.testing.assert_close(got, (sums.total / sums.tokens).detach())
    # What is said to the model afterwards reaches the stage that computes the loss.
    whole.z_loss = pipeline.model.z_loss = 0.1
    sums = whole(x, y)
    torch.testing.assert_close(evaluate_batch(pipeline, x, y), (sums.total / sums.tokens).detach())
    # Where nothing counts nothing is learned.
    run_batch(pipeline, x, torch.full_like(y, -100))
    assert all(not parameter.grad.any() for parameter in pipeline.model.parameters())


class Own(nn.Module):
    """A user's model: a list of blocks that its forward runs, with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(5))
        self.head = nn.Linear(8, 16)
        self.example_input_array = torch.zeros(2, 6, dtype=torch.long)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * 2
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def _own_model(schedule: Schedule) -> None:
    """Cut by torch's tracer, with recomputation and without."""
    torch.manual_seed(2)
    whole = Own()
    layout = Layout(pp=2, microbatches=4, schedule=schedule, activations="full" if schedule == "1f1b" else "keep")
    mesh = make_mesh(layout, "cpu")
    model = apply(copy.deepcopy(whole), mesh, device=CPU)
    known = state_of(model)
    assert known is not None
    assert blocks_of(model)
    for optimizer in (want := torch.optim.SGD(whole.parameters(), lr=0.5), torch.optim.SGD(model.parameters(), lr=0.5)):
        x, y = _batch(8, 6)
        loss = _mean(whole(x), y) if optimizer is want else run_batch(known.pipeline, x, y, _mean)
        if optimizer is want:
            loss.backward()
            expected = loss.detach()
        else:
            torch.testing.assert_close(loss, expected)
        optimizer.step()
    joined = full_state_dict(model, mesh)
    assert set(joined) == set(whole.state_dict())
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(joined[name], value)


def _on_two(rank: int) -> None:
    _own_model("1f1b")
    _own_model("zbv")
    _user_stack()
    _hugging_face()
    _what_does_not_fit()
    _documents()


@pytest.mark.slow
def test_other_models_and_batches() -> None:
    """Stacks, Hugging Face's decoders, packed documents, new shapes, wrong shapes."""
    # Imported before the processes are, so that it is once.
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**HUGGING_FACE))
        scaled = transformers.GraniteForCausalLM(transformers.GraniteConfig(**HUGGING_FACE, embedding_multiplier=2.0))
    with pytest.raises(LayoutError, match="GraniteModel changes hidden states outside its layers"):
        units_of(scaled)
    on_ranks(2, _on_two)


def _one_dies(rank: int) -> None:
    layout = Layout(pp=3, microbatches=3)
    mesh = make_mesh(layout, "cpu")
    pipeline = Pipeline(split_stages(_stack(), mesh), mesh, device=CPU)
    x, y = _batch(6, 4)
    run_batch(pipeline, x, y, _mean)
    if rank == 1:
        os._exit(0)
    with pytest.raises(LostPeerError, match="rank 1 is gone"):
        for _ in range(100):
            run_batch(pipeline, x, y, _mean)
            time.sleep(0.01)


@pytest.mark.slow
def test_a_rank_that_dies_is_named_by_the_others() -> None:
    """Also by those who do not talk to it."""
    on_ranks(3, _one_dies, dying=[1])


def test_a_model_that_is_no_chain_is_refused() -> None:
    """With the reason."""

    class Tree(nn.Module):
        pass

    with pytest.raises(LayoutError, match="in which order Tree runs its modules"):
        units_of(Tree())
    shared = nn.Linear(4, 4)
    with pytest.raises(LayoutError, match="share the parameter"):
        units_of(nn.Sequential(shared, nn.ReLU(), shared))
