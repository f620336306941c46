"""Models and loops of Hugging Face users under a layout: the same numbers as plain torch, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from piledriver.accelerator import Accelerator
from piledriver.engine import Layout
from piledriver.engine.errors import EngineError, LayoutError
from piledriver.runtime.world import group_world
from tests.checkpoint.processes import run

pytest.importorskip("transformers")

from tests.engine.fused.catalogue import batch, build

EAGER: dict[str, Any] = {"compile": False, "precision": "fp32"}


def models() -> dict[str, Callable[[], nn.Module]]:
    import transformers as hf

    hf.logging.set_verbosity_error()
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"intermediate_size": 64, "max_position_embeddings": 32}
    bert = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    t5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    bart = {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 32, "dropout": 0.0}
    for side in ("encoder", "decoder"):
        bart |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    mamba = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    return {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**small, tie_word_embeddings=True)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**small, **bert)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5, decoder_start_token_id=0)),
        "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**bart)),
        "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**mamba)),
    }


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return models()[name]()


def batch_of(rows: int, seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (rows, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def assert_like_plain(name: str, layout: Layout, rows: int = 2) -> Accelerator:
    """The loop of any Hugging Face example: loss and gradient norm of plain torch."""
    plain = made(name)
    expected: Any = plain(**batch_of(rows))
    expected.loss.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    accelerator = Accelerator(world=group_world(), layout=layout)
    model = accelerator.prepare(made(name))
    out = model(**batch_of(rows))
    accelerator.backward(out.loss)
    torch.testing.assert_close(out.loss.detach(), expected.loss.detach())
    found = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(torch.as_tensor(found), norm, rtol=1e-4, atol=1e-6)
    state = accelerator.get_state_dict(model)
    if layout.pp == 1:
        assert set(state) >= set(plain.state_dict()), set(plain.state_dict()) - set(state)
    else:
        assert set(state) == set(plain.state_dict())
        torch.testing.assert_close(state["lm_head.weight"], plain.state_dict()["lm_head.weight"])
    accelerator.free_memory()
    return accelerator


def _on_two(rank: int) -> None:
    # One row in the batch, encoders and decoders that share an embedding; checked against the plain model.
    for name in ("llama", "t5", "bart", "bert"):
        assert_like_plain(name, Layout(tp=2, debug=True, **EAGER), rows=1)
    with pytest.raises(LayoutError, match="reads a submodule's weights without calling it"):
        assert_like_plain("mamba", Layout(tp=2, **EAGER))
    assert_like_plain("llama", Layout(cp=2, **EAGER))
    for name in ("bert", "t5", "bart", "mamba"):
        with pytest.raises(LayoutError, match="cp 2 needs to know where"):
            Accelerator(world=group_world(), layout=Layout(cp=2, **EAGER)).prepare(made(name))
    for name, layout, reason in (
        ("mixtral", Layout(tp=2, **EAGER), "tp does not shard the stacked experts"),
        ("gemma2", Layout(cp=2, **EAGER), "attn_logit_softcapping"),
        ("llama4", Layout(cp=2, **EAGER), "chunked_attention of Llama4ForCausalLM mixes positions"),
    ):
        with pytest.raises(LayoutError, match=reason):
            Accelerator(world=group_world(), layout=layout).prepare(build(name))
    for name, window, reason in (
        ("gpt-oss", {"sliding_window": 64}, "sinks"),
        ("deepseek-v3", {}, "another width"),
        ("mistral", {}, "a window"),
    ):
        model = Accelerator(world=group_world(), layout=Layout(cp=2, **EAGER)).prepare(build(name, **window))
        with pytest.raises(EngineError, match=reason):
            model(**batch(name))
    model = Accelerator(world=group_world(), layout=Layout(cp=2, **EAGER)).prepare(build("mixtral"))
    with pytest.raises(EngineError, match="balance loss would be that of a shard"):
        model(**batch("mixtral"), output_router_logits=True)
    # A part of the blocks is recomputed, after others that were given the cache of the model.
    assert_like_plain("llama", Layout(zero=2, activations="budget", activation_budget=0.6, **EAGER))
    # `model(**batch).loss`, and all keys of a tied model.
    assert_like_plain("llama", Layout(pp=2, microbatches=2, **EAGER))
    for layout in (Layout(tp=2, debug=True, **EAGER), Layout(cp=2, debug=True, **EAGER)):
        model = Accelerator(world=group_world(), layout=layout).prepare(made("llama"))
        with pytest.raises(EngineError, match=r"ranks 0 and 1 of one .p group were given different batches"):
            model(**batch_of(2, seed=rank))
    for zero in (1, 3):
        model = made("llama")
        accelerator = Accelerator(world=group_world(), layout=Layout(zero=zero, **EAGER))
        with pytest.raises(LayoutError, match=f"Adafactor needs full parameters.*zero={zero}"):
            accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))


@pytest.mark.slow
def test_foreign_models_train_as_in_plain_torch_or_are_refused() -> None:
    run(2, _on_two)
