"""Tensor, sequence and loss parallel: a split model is the same function with the same gradients."""

from __future__ import annotations

import unittest
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from piledriver.engine import Layout, LayoutError
from piledriver.engine.fp8.apply import fp8_layers, use_fp8_layers
from piledriver.engine.mesh import Mesh, make_mesh
from piledriver.engine.tensor_parallel import apply_tp
from piledriver.engine.tensor_parallel.inferred import split_logits
from piledriver.engine.tensor_parallel.roles import Role, infer_roles
from piledriver.engine.tensor_parallel.transformer import check_tp_divisible, split_transformer
from piledriver.models import LatentAttentionConfig, MoEConfig, Transformer
from piledriver.models.quantised import quantise_linears
from tests.checkpoint.processes import run
from tests.engine.parallel_steps import VOCAB, assert_like_one_process, config

SHAPES: dict[str, dict[str, Any]] = {
    "grouped queries": {"kv_heads": 2},
    "neox": {
        "norm": "layer", "norm_bias": True, "parallel_residual": True, "mlp": "plain", "activation": "gelu",
        "qkv_bias": True, "out_bias": True, "mlp_bias": True, "rope_fraction": 0.25, "tied": False,
    },
    "norm of all heads at once": {"qk_norm": "full", "norm_placement": "post", "tied": False},
    "norm of each head, capped logits": {"qk_norm": "head", "kv_heads": 2, "logit_softcap": 5.0},
    "slopes per head": {"positions": "alibi"},
    "learned positions": {"positions": "learned", "norm": "layer", "norm_bias": True, "mlp": "plain", "mlp_bias": True},
    "experts": {"moe": MoEConfig(experts=4, experts_per_token=2), "mlp_dim": 64},
    "capped scores in a window": {"attention_softcap": 3.0, "sliding_window": 4},
    "latent attention, shared experts": {
        "head_dim": 12, "latent": LatentAttentionConfig(kv_rank=16, rope_dim=4, value_dim=10, q_rank=12),
        "moe": MoEConfig(experts=4, expert_dim=64, shared_dim=64, shared_gate=True, dense_layers=(0,),
                         scores="sigmoid", correction_bias=True),
    },
    "sinks, experts with biases": {
        "kv_heads": 2, "sliding_window": 4, "attention_sinks": True, "mlp_bias": True, "gate_limit": 0.1,
        "activation": "quick_gelu", "moe": MoEConfig(experts=4, expert_dim=64, router_bias=True),
    },
    "shared norm, biased output": {
        "positions": "alibi", "norm": "layer", "norm_bias": True, "embedding_norm": True, "parallel_residual": True,
        "shared_norm": True, "qk_norm": "per_head", "mlp": "plain", "activation": "xielu", "head_bias": True,
        "tied": False,
    },
    "norms on both sides": {
        "norm_placement": "both", "norm_unit_offset": True, "embedding_scale": 0, "residual_scale": 0.5,
        "logit_scale": 0.5, "qk_norm": "head", "sliding_window": 5, "full_attention_layers": (1,),
        "sliding_rope_theta": 100.0,
    },
}  # fmt: skip


class Attention(nn.Module):
    """As people write it: separate projections, heads counted."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        q, k, v = (
            layer(x).view(batch, time, self.num_heads, self.head_dim).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, -1))


class Stack(nn.Module):
    """What a user writes, with a pair in a sequence, torch's own attention and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCAB, 16, padding_idx=0)
        self.attention = Attention(16, 4)
        self.mixed = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.odd = nn.Sequential(nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 16))
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x)
        x = x + self.mixed(x, x, x, need_weights=False)[0]
        x = x + self.mlp(x) * self.scale + self.odd(x)
        return self.head(x)


class Liar(nn.Module):
    """Two linear layers that look like a pair, with something between them that is not elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.fc1, self.block.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block.fc2(self.block.fc1(x).softmax(dim=-1))


def hugging_face_configs() -> dict[str, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    small = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "vocab_size": VOCAB, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    grouped = {**small, "num_key_value_heads": 2}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64, "bos_token_id": 1}
    return {
        "llama": transformers.LlamaConfig(**grouped),
        "qwen2": transformers.Qwen2Config(**grouped, tie_word_embeddings=True),
        "qwen3": transformers.Qwen3Config(**grouped, head_dim=16),
        "gpt_neox": transformers.GPTNeoXConfig(**small),
        "gpt2": transformers.GPT2Config(**gpt2, eos_token_id=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
        "olmo": transformers.OlmoConfig(**grouped, clip_qkv=3.0),
        "olmo2": transformers.Olmo2Config(**grouped),
        "phi": transformers.PhiConfig(**small),
        "phi3": transformers.Phi3Config(**grouped),
        "gemma2": transformers.Gemma2Config(**grouped, head_dim=8),
    }


def _on_two(rank: int) -> None:
    for options in SHAPES.values():
        assert_like_one_process(config(**options), Layout(tp=2))
    whole = [Layout(tp=2, sequence_parallel=False), Layout(tp=2, loss_parallel=False)]
    for layout in whole:
        for name in (
            "norm of all heads at once",
            "learned positions",
            "experts",
            "latent attention, shared experts",
            "shared norm, biased output",
        ):
            assert_like_one_process(config(**SHAPES[name]), layout)
    mesh = make_mesh(Layout(tp=2, debug=True), "cpu")
    for name in ("neox", "slopes per head", "experts", "latent attention, shared experts"):
        apply_tp(Transformer(config(**SHAPES[name])), mesh)
    _tied_stay_tied(mesh)
    _stacks(mesh)
    with pytest.raises(LayoutError, match=r"sharded over tp 2, the module 'block.fc2' differs from the plain model"):
        apply_tp(Liar(), mesh)
    _compiled(mesh)
    _fp8(mesh)
    # Layers of unknown names are replicated; a warning is logged once, by the first rank.
    unknown = nn.ModuleDict({"alpha": nn.Linear(4, 4), "beta": nn.Linear(4, 4)})
    look = unittest.TestCase().assertLogs if rank == 0 else unittest.TestCase().assertNoLogs
    with look("piledriver.engine.tensor_parallel", "WARNING"):
        apply_tp(unknown, make_mesh(Layout(tp=2), "cpu"))


def _tied_stay_tied(mesh: Mesh) -> None:
    model = Transformer(config(tied=True))
    names = [name for name, _ in model.named_parameters()]
    apply_tp(model, mesh)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).total.backward()
    assert isinstance(model.embedding.weight.grad, DTensor)


def _stacks(mesh: Mesh) -> None:
    alone, split = Stack(), Stack()
    apply_tp(split, mesh)
    assert split.attention.num_heads == 2
    assert split.odd[0].weight.to_local().shape == (7, 16)
    tokens = torch.arange(20).view(2, 10)
    F.cross_entropy(alone(tokens).flatten(0, 1), tokens.flatten()).backward()
    with split_logits(split):
        logits = split(tokens)
        assert isinstance(logits, DTensor)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()
    for mine, theirs in zip(split.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def _fp8(mesh: Mesh) -> None:
    """Each process scales its own part: as near to fp8 on one process as that is to fp32."""
    shape = config(dim=64, tied=False)
    tokens = torch.arange(32).view(2, 16)
    exact, alone, split = (Transformer(shape) for _ in range(3))
    apply_tp(split, mesh)
    for precision in ("fp8", "fp8-rowwise"):
        for model in (alone, split):
            use_fp8_layers(model, Layout(precision=precision), worth=0.0)
        assert "blocks.0.attention.qkv" in fp8_layers(split)
        wanted, near, found = (model(tokens, tokens).total for model in (exact, alone, split))
        assert abs(found - wanted) <= 2 * abs(near - wanted) + 1e-3 * wanted
        found.backward()


def _compiled(mesh: Mesh) -> None:
    """One graph a block, with the exchanges in it."""
    model = Transformer(config(**SHAPES["norm of all heads at once"]))
    apply_tp(model, mesh)
    tokens = torch.arange(16).view(2, 8)
    before = model(tokens, tokens).total
    for block in model.blocks.values():
        block.compile(backend="aot_eager", fullgraph=True)
    after = model(tokens, tokens).total
    torch.testing.assert_close(after, before)
    after.backward()


def _hugging_face(rank: int) -> None:
    from transformers import AutoModelForCausalLM

    mesh = make_mesh(Layout(tp=2, debug=True), "cpu")
    tokens = torch.arange(22).view(2, 11)
    for name, shape in hugging_face_configs().items():
        torch.manual_seed(0)
        alone = AutoModelForCausalLM.from_config(shape)
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)  # also biases and norms count
        split = AutoModelForCausalLM.from_config(shape)
        split.load_state_dict(alone.state_dict())
        # The check of the debug mode compares all modules and all gradients.
        apply_tp(split, mesh)
        torch.testing.assert_close(split(tokens, labels=tokens).loss, alone(tokens, labels=tokens).loss, msg=name)
        held = sum(parameter.to_local().numel() for parameter in split.parameters())
        assert held < 0.55 * sum(parameter.numel() for parameter in alone.parameters()), name


@pytest.mark.slow
def test_split_models_are_the_same_function() -> None:
    run(2, _on_two)


@pytest.mark.slow
def test_hugging_face_models_are_split_by_their_own_names() -> None:
    pytest.importorskip("transformers")
    run(2, _hugging_face)


def test_a_tp_that_cuts_heads_is_refused_with_the_nearest() -> None:
    with pytest.raises(LayoutError, match=r"tp 4 does not divide the 6 key-value heads \(of 12 heads\). Fix: use tp=3"):
        check_tp_divisible(config(dim=48, heads=12, kv_heads=6), 4)
    with pytest.raises(LayoutError, match=r"tp 8 does not divide the 4 blocks of 32 .* Fix: use tp=4"):
        check_tp_divisible(config(heads=8, mlp_dim=128), 8)
    with pytest.raises(LayoutError, match=r"tp 3 does not divide the 4 key-value heads"):
        infer_roles(Stack(), 3)


def test_quantised_layers_are_rejected() -> None:
    model = Transformer(config())
    quantise_linears(model, "int8")
    with pytest.raises(LayoutError, match="tp does not shard quantised linear layers"):
        split_transformer(model, Any, Layout(tp=2))  # before the mesh is used


def test_what_is_not_understood_stays_whole() -> None:
    roles = infer_roles(Stack(), 2)
    assert roles["mlp.1"] is Role.COLWISE
    assert roles["mlp.3"] is Role.ROWWISE
    assert roles["head"] is Role.HEAD
    assert roles["embedding"] is Role.VOCAB
    assert not any(name.startswith(("odd", "mixed")) for name in roles)
    assert infer_roles(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4)), 2) == {}


@pytest.mark.parametrize("mlp", ["relu", "gated-gelu"])
def test_every_projection_of_t5_has_a_role(mlp: str) -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    shape.feed_forward_proj = mlp
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape.to_dict()))
    roles = infer_roles(model, 2)
    assert {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} <= set(roles)
