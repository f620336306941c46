"""One registry for all kernels; an attention kernel of another package is chosen by name and never by accident."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from piledriver.core.errors import UsageError
from piledriver.core.registry import Registry
from piledriver.engine.activations.checkpoint import Recompute
from piledriver.kernels import KERNELS, Kernel, ops_to_save
from piledriver.kernels.attention import kernel as attention
from piledriver.kernels.registry import _BUILT_IN, fastest_kernel
from piledriver.models import ModelConfig, Transformer, make_masks

CONFIG = ModelConfig(vocab_size=32, dim=16, layers=2, heads=2, max_positions=16)

MODULE = '''
import torch
from piledriver.kernels.attention import AttentionKernel
from piledriver.kernels.attention.reference import reference_attention

calls = []

@torch.library.custom_op("outside::attention", mutates_args=())
def op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    calls.append("forward")
    return reference_attention(q, k, v, causal=True, scale=scale)

def backward(ctx, gradient):
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        out = reference_attention(*leaves, causal=True, scale=ctx.scale)
    return *torch.autograd.grad(out, leaves, gradient), None

def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.scale = inputs[3]

op.register_autograd(backward, setup_context=setup_context)

class OutsideAttention(AttentionKernel):
    """Plain causal attention from outside."""
    documents = window = alibi = softcap = False
    ops_to_save = ("outside::attention",)

    def __call__(self, q, k, v, mask, *, scale, **_):
        return op(q, k, v, scale)
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package that adds an attention kernel, and a registry that has not read entry points yet."""
    (tmp_path / "outside_kernels.py").write_text(MODULE)
    info = tmp_path / "outside_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[piledriver.attention_kernel]\noutside = outside_kernels:OutsideAttention\nsdpa = outside_kernels:Nothing\n"
        "wrong = outside_kernels:calls\nmissing = not_there:Kernel\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    fresh: Registry[type[Kernel]] = Registry("attention_kernel", _BUILT_IN["attention"])
    monkeypatch.setitem(KERNELS, "attention", fresh)
    monkeypatch.setattr(attention, "ATTENTION", fresh)
    monkeypatch.delitem(sys.modules, "outside_kernels", raising=False)
    return "outside"


def test_every_operation_has_a_reference_that_runs_everywhere() -> None:
    for operation, kernels in KERNELS.items():
        assert kernels.kind == f"{operation}_kernel"
        for name in kernels:
            assert issubclass(kernels[name], Kernel)
            assert kernels[name].__doc__
        for device in ("cpu", "cuda", "meta"):
            assert kernels["reference"].runs_on(torch.device(device))


def test_a_cpu_gets_the_reference() -> None:
    for operation in ("cross_entropy", "gated_mlp", "adamw", "fp8"):
        assert type(fastest_kernel(operation, torch.device("cpu"))) is KERNELS[operation]["reference"]


def test_a_kernel_from_outside_computes_a_model(outside: str) -> None:
    model, tokens = Transformer(CONFIG), torch.randint(32, (2, 9))
    expected = model(tokens, tokens).total
    model.use_attention_kernel(outside)
    found = model(tokens, tokens).total
    calls = sys.modules["outside_kernels"].calls
    assert calls == ["forward"] * CONFIG.layers
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(torch.autograd.grad(found, list(model.parameters())), wanted, rtol=1e-4, atol=1e-5)


def test_what_it_does_not_support_is_refused(outside: str) -> None:
    with pytest.raises(UsageError, match="OutsideAttention does not support documents"):
        make_masks(CONFIG, 8, "cpu", torch.zeros(1, 8, dtype=torch.long), kernel=outside)
    with pytest.raises(UsageError, match="'wrong' is"):
        make_masks(CONFIG, 8, "cpu", kernel="wrong")


def test_installing_it_changes_no_built_in_name(outside: str) -> None:
    assert KERNELS["attention"]["sdpa"].__name__ == "SDPA"
    assert outside in list(KERNELS["attention"])


def test_selective_checkpointing_keeps_its_output(outside: str) -> None:
    (KERNELS["attention"]._targets).pop("wrong", None)
    list(KERNELS["attention"])
    KERNELS["attention"]._targets.pop("wrong", None)
    assert {
        "outside::attention",
        "aten::_scaled_dot_product_flash_attention",
        "piledriver::fp8_linear",
    } <= ops_to_save()
    model, tokens = Transformer(CONFIG), torch.randint(32, (2, 9))
    model.use_attention_kernel(outside)
    for selective, times in ((True, 1), (False, 2)):
        for block in model.blocks.values():
            block.forward = Recompute(type(block).forward.__get__(block), selective=selective)  # type: ignore[method-assign]
        model(tokens, tokens).total.backward()
        calls = sys.modules["outside_kernels"].calls
        assert len(calls) == times * CONFIG.layers
        calls.clear()
