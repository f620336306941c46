"""Context parallel: sequences in parts give the losses, weights and logits of whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from piledriver.engine import EngineError, Layout, LayoutError
from piledriver.engine.context_parallel import apply_cp
from piledriver.engine.context_parallel.apply import check_model
from piledriver.engine.context_parallel.ring_attention import ring_attention
from piledriver.engine.context_parallel.sequence_sharding import SequenceSharding
from piledriver.engine.data_parallel import attach_reducer
from piledriver.engine.mesh import make_mesh
from piledriver.engine.options import DDPOptions
from piledriver.engine.shards.collectives import Group
from piledriver.models import LatentAttentionConfig, MoEConfig, Transformer, make_masks
from tests.checkpoint.processes import run
from tests.engine.parallel_steps import assert_like_one_process, config, lay_out
from tests.engine.tensor_parallel.test_tensor import hugging_face_configs

RING, HEADS = Layout(cp=2), Layout(cp=2, cp_method="all-to-all")
SINKS = {"attention_sinks": True, "sliding_window": 5, "no_rope_layers": (1,), "temperature_scale": 0.3}
LATENT = {"head_dim": 12, "latent": LatentAttentionConfig(kv_rank=16, rope_dim=4, value_dim=10)}


@given(st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_every_token_is_in_one_part(size: int, time: int, zigzag: bool) -> None:
    tokens = torch.arange(1, time + 1)[None]
    parts = [SequenceSharding(Group("", size, rank), zigzag=zigzag).shard(tokens, 1) for rank in range(size)]
    found = torch.cat(parts, 1)
    assert sorted(found[found != 0].tolist()) == tokens[0].tolist()
    assert len({part.shape for part in parts}) == 1


def _on_two(rank: int) -> None:
    for options in ({"kv_heads": 2}, {"positions": "learned"}, {"kv_heads": 1, "qk_norm": "full", "tied": False}):
        for layout in (RING, HEADS):
            assert_like_one_process(config(**options), layout)
    for options in ({"positions": "alibi"}, {"sliding_window": 5, "attention_softcap": 4.0}, {"kv_heads": 2}):
        assert_like_one_process(config(**options), HEADS, documents=True)
    for options in (SINKS, LATENT):
        assert_like_one_process(config(**options), HEADS)
    assert_like_one_process(config(), Layout(cp=2, zero=3))
    model = Transformer(config(moe=MoEConfig(experts=2, experts_per_token=1)))
    lay_out(model, RING)
    with pytest.raises(EngineError, match="7 tokens in 4 chunks need padding"):
        model(torch.zeros(1, 7, dtype=torch.long))
    model = Transformer(config())
    lay_out(model, RING)
    masks = make_masks(model.config, 8, "cpu", torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(EngineError, match=r"not document masks\. Fix: use cp_method='all-to-all'"):
        model(torch.zeros(1, 8, dtype=torch.long), masks=masks)
    with pytest.raises(LayoutError, match="cp 2 needs to know where Linear uses positions"):
        apply_cp(nn.Linear(2, 2), make_mesh(RING, "cpu"))


@pytest.mark.slow
def test_sequences_in_two_parts() -> None:
    run(2, _on_two)


def _hugging_face(rank: int) -> None:
    """Loss, gradients and logits; a model that was made from the same config keeps its own attention."""
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(26).view(2, 13)
    labels = tokens.clone()
    labels[:, :4] = -100
    shapes = hugging_face_configs()
    for layout in (RING, HEADS):
        mesh = make_mesh(layout, "cpu")
        for name in ("llama", "qwen3", "gpt_neox", "gpt2"):
            torch.manual_seed(0)
            spread = AutoModelForCausalLM.from_config(shapes[name])
            alone = AutoModelForCausalLM.from_config(shapes[name])
            alone.load_state_dict(spread.state_dict())
            apply_cp(spread, mesh)
            reducer = attach_reducer(spread, mesh, DDPOptions())
            found, wanted = spread(tokens, labels=labels).loss, alone(tokens, labels=labels).loss
            torch.testing.assert_close(found, wanted)
            found.backward()
            wanted.backward()
            for mine, theirs in zip(spread.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)
            with torch.no_grad():
                torch.testing.assert_close(spread(input_ids=tokens).logits, alone(tokens).logits)
            with pytest.raises(EngineError, match="padding in attention_mask"):
                spread(tokens, attention_mask=tokens > 3)
            assert reducer is not None


@pytest.mark.slow
def test_hugging_face_models_in_parts() -> None:
    pytest.importorskip("transformers")
    run(2, _hugging_face)


def _on_four(rank: int) -> None:
    for layout in (
        Layout(cp=4),
        Layout(cp=4, cp_method="all-to-all"),
        Layout(cp=2, tp=2),
        Layout(cp=2, dp_replicate=2),
    ):
        assert_like_one_process(config(kv_heads=2), layout)
    assert_like_one_process(config(positions="alibi"), Layout(cp=2, tp=2, cp_method="all-to-all"))
    _ring_in_half_precision(rank)


def _ring_in_half_precision(rank: int) -> None:
    """SequenceSharding are merged in fp32: the ring is no further off than one kernel in the same precision."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, 32, 16, generator=generator) for _ in range(3)]
    exact = F.scaled_dot_product_attention(*whole, is_causal=True, scale=0.25)
    parts = SequenceSharding(Group.of(make_mesh(Layout(cp=4), "cpu").cp), zigzag=True)
    q, k, v = (parts.shard(x, 2).bfloat16() for x in whole)
    out = ring_attention(q, k, v, 0.25, parts.group)
    plain = F.scaled_dot_product_attention(*(x.bfloat16() for x in whole), is_causal=True, scale=0.25)
    assert (out.float() - parts.shard(exact, 2)).abs().max() <= 2 * (plain.float() - exact).abs().max()


@pytest.mark.slow
def test_sequences_in_four_parts_and_beside_other_axes() -> None:
    run(4, _on_four)


@pytest.mark.parametrize(
    ("options", "layout", "reason"),
    [
        ({"positions": "alibi"}, RING, "ring attention has no kernel for ALiBi. Fix: use cp_method='all-to-all'"),
        ({"sliding_window": 4}, RING, "ring attention has no kernel for a sliding window"),
        ({"attention_sinks": True}, RING, "ring attention has no kernel for attention sinks"),
        (LATENT, RING, "ring attention has no kernel for latent attention"),
        (
            {"heads": 4},
            Layout(cp=8, cp_method="all-to-all"),
            "does not divide the 4 heads that tp 1 leaves. Fix: use cp=4",
        ),
    ],
)
def test_what_a_method_cannot_do_is_refused(options: dict[str, Any], layout: Layout, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        check_model(config(**options), layout)
