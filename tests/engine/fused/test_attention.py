"""Attention of transformers' models: packed documents and windows without dense masks, equal to `sdpa`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piledriver.engine.apply import apply_compute
from piledriver.engine.compile import compile_report, reset_compiler
from piledriver.engine.errors import EngineError
from piledriver.engine.fused.attention import NAMES
from piledriver.engine.fused.attention import masks as attention_masks
from piledriver.engine.fused.attention.masks import MaskParts, read_mask_function
from piledriver.engine.fused.report import report_of
from piledriver.engine.fused.undo import unfuse
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.options import EngineOptions
from piledriver.kernels.attention import Mask
from tests.engine.gpu import ON_GPU

pytest.importorskip("transformers")

from transformers import masking_utils as theirs

from tests.engine.fused.catalogue import batch, build

# dynamo looks at the gradients of everything it guards, and expects that warnings are not errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [*range(10), *range(6)]])


def fused(model: nn.Module, device: str = "cpu", **layout: Any) -> nn.Module:
    return apply_compute(model, make_mesh(Layout(fuse=True, **layout), device), EngineOptions())


@pytest.fixture
def _block_masks_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention computes its plain formula on a CPU, forward only: enough to hold masks to `sdpa`'s."""
    monkeypatch.setattr(attention_masks, "has_kernels", lambda _: True)
    monkeypatch.setattr("piledriver.engine.fused.attention.interface.has_kernels", lambda _: True)


@pytest.mark.usefixtures("_block_masks_on_cpu")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen3-moe", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("packed", [False, True])
def test_logits_are_those_of_dense_masks(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    original, given = build(name).eval(), batch(name)
    twin = fused(copy.deepcopy(original))
    report = report_of(twin)
    assert report is not None
    assert any(entry.operation == "attention" for entry in report.replaced)
    masks: list[Any] = []
    for function in ("mask_of", "block_mask_of"):
        real = getattr(attention_masks, function)
        monkeypatch.setattr(attention_masks, function, lambda *args, real=real: masks.append(real(*args)) or masks[-1])
    positions = {"position_ids": PACKED} if packed else {}
    with torch.no_grad():
        expected = original(**given, **positions)
        found = twin(**given, **positions)
        continued = twin.generate(given["input_ids"][:, :9], max_new_tokens=4, do_sample=False)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.logits * 1.0, expected.logits, rtol=1e-4, atol=1e-5)
    assert any(isinstance(mask, Mask) for mask in masks) == (packed or name not in ("llama", "qwen3-moe"))
    assert torch.equal(continued, original.generate(given["input_ids"][:, :9], max_new_tokens=4, do_sample=False))
    # Padding, and dropout of attention, keep the dense mask.
    masks.clear()
    padding = torch.ones_like(given["input_ids"])
    padding[1, -3:] = 0
    with torch.no_grad():
        torch.testing.assert_close(
            twin(**given, attention_mask=padding).loss, original(**given, attention_mask=padding).loss
        )
    assert not masks


@pytest.mark.usefixtures("_block_masks_on_cpu")
def test_undoing_copies_and_config_files(tmp_path: Any) -> None:
    model: Any = fused(build("llama"))
    assert model.config._attn_implementation == NAMES["sdpa"]
    assert copy.deepcopy(model).config._attn_implementation == NAMES["sdpa"]
    same = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(same(**batch("llama")).loss, model(**batch("llama")).loss)
    model.save_pretrained(tmp_path)
    assert NAMES["sdpa"] not in (tmp_path / "config.json").read_text()
    unfuse(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("_block_masks_on_cpu")
def test_attention_weights_that_are_never_computed_are_rejected() -> None:
    model = fused(build("gpt-oss"))
    with pytest.raises(EngineError, match="output_attentions"):
        model(**batch("gpt-oss"), output_attentions=True)
    unfuse(model)
    with torch.no_grad():
        assert model(**batch("gpt-oss"), output_attentions=True).attentions[0].shape == (2, 4, 16, 16)


@pytest.mark.usefixtures("_block_masks_on_cpu")
def test_other_implementations_are_left_alone_with_the_reason() -> None:
    for name, changes, reason in (
        ("llama", {"attn_implementation": "eager"}, "its implementation is eager"),
        ("gpt2", {}, "it does not take other implementations"),
    ):
        report = report_of(fused(build(name, **changes)))
        assert report is not None
        assert next(entry.note for entry in report.left if entry.operation == "attention").startswith(reason)
    bert = report_of(fused(build("bert")))
    assert bert is not None
    assert all(entry.operation != "attention" for entry in [*bert.replaced, *bert.left])


def test_masks_of_other_parts_are_not_read() -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert read_mask_function(theirs.causal_mask_function) == MaskParts()
    assert read_mask_function(theirs.sliding_window_causal_mask_function(5)) == MaskParts(5)
    assert read_mask_function(theirs.bidirectional_mask_function) is None
    assert read_mask_function(theirs.chunked_causal_mask_function(3, ids[:, 0])) is None
    assert (
        read_mask_function(theirs.or_masks(theirs.causal_mask_function, theirs.packed_sequence_mask_function(ids)))
        is None
    )
    assert read_mask_function(theirs.packed_sequence_mask_function(ids)) is None
    assert read_mask_function(theirs.and_masks(theirs.causal_mask_function, lambda *_: True)) is None


@pytest.mark.usefixtures("_block_masks_on_cpu")
@torch.no_grad()
def test_documents_are_looked_for_only_where_a_call_gives_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    real = theirs.find_packed_sequence_indices
    monkeypatch.setattr(theirs, "find_packed_sequence_indices", lambda ids: looked.append(ids) or real(ids))
    monkeypatch.setattr("piledriver.engine.fused.attention.has_kernels", lambda _: True)
    # With a cache transformers never looks.
    model, given = fused(build("llama", use_cache=False)), batch("llama")
    original = build("llama", use_cache=False)
    expected = original(**given).loss
    assert len(looked) == 1
    looked.clear()
    torch.testing.assert_close(model(**given).loss, expected)
    torch.testing.assert_close(model(given["input_ids"], labels=given["labels"]).loss, expected)
    assert not looked
    packed = model(given["input_ids"], None, PACKED, labels=given["labels"]).loss
    assert len(looked) == 1
    torch.testing.assert_close(packed, original(**given, position_ids=PACKED).loss)
    # A call that fails leaves nothing behind.
    with pytest.raises(IndexError):
        model(given["input_ids"] + 1000)
    looked.clear()
    original(**given)
    assert len(looked) == 1
    unfuse(model)
    model(**given)
    assert len(looked) == 2


@pytest.mark.usefixtures("_block_masks_on_cpu")
@torch.no_grad()
def test_windows_and_documents_of_varying_lengths_compile_once_for_each_kind_of_block() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    model = build("gemma3", head_dim=16, num_hidden_layers=4, sliding_window=64, layer_types=kinds, use_cache=False)
    mesh = make_mesh(Layout(fuse=True, compile=True), "cpu")
    apply_compute(model, mesh, EngineOptions(compile={"backend": "eager"}))
    reset_compiler()
    graphs = []
    for step, length in enumerate((256, 256, 384, 320, 200)):
        cut = 50 + 17 * step
        positions = torch.cat((torch.arange(cut), torch.arange(length - cut))).expand(2, -1)
        model(**batch("gemma3", length=length), position_ids=positions)
        graphs.append(compile_report().graphs)
    # With and without a window; the second length makes lengths symbolic, once.
    assert graphs == [2, 2, 4, 4, 4]
    assert not compile_report().breaks
    reset_compiler()


class TestOnGpu:
    pytestmark = ON_GPU

    @pytest.mark.parametrize(
        ("name", "precision"),
        [("gpt-oss", "fp32"), ("gpt-oss", "bf16"), ("gemma2", "fp32"), ("gemma3", "bf16"), ("llama", "bf16")],
    )
    def test_gradients_are_those_of_dense_masks(self, name: str, precision: str) -> None:
        torch.set_float32_matmul_precision("highest")
        # All experts: hidden states in bf16 would send some tokens to others, and a gradient jumps where that happens.
        every = {"num_experts_per_tok": 4} if name == "gpt-oss" else {}
        original = build(name, hidden_size=64, head_dim=32, max_position_embeddings=512, **every).cuda()
        with torch.no_grad():
            for parameter in original.parameters():
                parameter.mul_(0.3 if parameter.ndim > 1 else 1.0)
        given = {key: one.cuda() if isinstance(one, Tensor) else one for key, one in batch(name, length=256).items()}
        positions = torch.cat((torch.arange(100), torch.arange(156))).repeat(2, 1).cuda()
        twin = fused(copy.deepcopy(original), "cuda", precision=precision, compile=precision == "bf16")
        report = report_of(twin)
        assert report is not None
        assert any(entry.operation == "attention" for entry in report.replaced), str(report)
        found: Any = []
        for model in (twin, original):
            for _ in range(2):
                model.zero_grad()
                loss = model(**given, position_ids=positions).loss
                loss.backward()
            found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
        (loss, gradients), (expected_loss, expected) = found
        assert float(loss) == pytest.approx(float(expected_loss), rel=0.01 if precision == "bf16" else 1e-5)
        scale = max(float(gradient.norm()) for gradient in expected.values())
        apart = {
            key: float((gradients[key] - gradient).norm()) / max(float(gradient.norm()), 0.02 * scale)
            for key, gradient in expected.items()
        }
        worst = max(apart, key=lambda key: apart[key])
        assert apart[worst] < (0.1 if precision == "bf16" else 1e-3), worst

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
    def test_a_step_never_waits_for_the_device(self) -> None:
        model = build("llama", hidden_size=64, head_dim=32, use_cache=False).cuda()
        model = fused(model, "cuda", precision="bf16", compile=False)
        given = {key: one.cuda() if isinstance(one, Tensor) else one for key, one in batch("llama").items()}
        for _ in range(2):
            model(**given).loss.backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(**given).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
