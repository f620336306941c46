"""Every attention kernel gives what the formula gives; blocks of keys merge into the whole."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from piledriver.core.errors import UnknownNameError, UsageError
from piledriver.kernels.attention import ATTENTION, Mask, alibi_slopes, attend, attention_kernel, build_mask
from piledriver.kernels.attention.blockwise import attend_block, attend_block_backward, merge_blocks
from piledriver.kernels.attention.dispatch import choose_kernel
from piledriver.kernels.attention.reference import ReferenceAttention, reference_attention
from tests.engine.gpu import ON_GPU

CPU = torch.device("cpu")
IDS = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3], [4] * 12])
NEEDS = {
    "causal": {},
    "documents": {"documents": True},
    "window": {"window": True},
    "documents and window": {"documents": True, "window": True},
    "ALiBi": {"alibi": True},
    "soft cap": {"softcap": True},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": True},
    "everything": {"documents": True, "window": True, "alibi": True, "softcap": True, "sinks": True},
}


def needs(**given: bool) -> dict[str, bool]:
    return {name: given.get(name, False) for name in ("documents", "window", "alibi", "softcap", "sinks")}


def inputs(device: str, dtype: torch.dtype, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 12, 16), (2, kv_heads, 12, 16), (2, kv_heads, 12, 16))
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes)
    return q, k, v


def compute(name: str, asked: dict[str, bool], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of one kernel; flex attention has no gradient on a CPU."""
    q, k, v = inputs(device, dtype)
    has_gradient = name != "flex" or device != "cpu"
    if not has_gradient:
        q, k, v = (x.detach() for x in (q, k, v))
    kernel = attention_kernel(name)
    slopes = alibi_slopes(4) if asked["alibi"] else None
    options: dict[str, Any] = {
        "scale": 0.3,
        "window": 3 if asked["window"] else None,
        "softcap": 2.0 if asked["softcap"] else None,
        "slopes": None if slopes is None else torch.tensor(slopes, device=device),
    }
    if asked["sinks"]:
        options["sinks"] = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    ids = IDS.to(device) if asked["documents"] else None
    mask = build_mask(kernel.mask_form, 12, torch.device(device), ids, window=options["window"], slopes=slopes)
    gradient = torch.randn(2, 4, 12, 16, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a CPU flex attention runs by the formula, and warns that it is slow
        out = kernel(q, k, v, mask, **options)
        assert torch.equal(out, attend(q, k, v, mask._replace(kernel=kernel), **options))
    return [out, *torch.autograd.grad(out, (q, k, v), gradient)] if has_gradient else [out]


@pytest.mark.parametrize("asked", NEEDS)
@pytest.mark.parametrize("name", ["sdpa", "flex", "flash"])
def test_kernels_are_the_formula(name: str, asked: str) -> None:
    wanted = needs(**NEEDS[asked])
    if attention_kernel(name).missing(**wanted):
        with pytest.raises(UsageError, match="does not support"):
            choose_kernel(name, CPU, **wanted)
        return
    found, expected = (compute(each, wanted, "cpu", torch.float32) for each in (name, "reference"))
    torch.testing.assert_close(found, expected[: len(found)], rtol=1e-4, atol=1e-5)


class TestOnGpu:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("asked", NEEDS)
    @pytest.mark.parametrize("name", ["sdpa", "varlen", "flex", "flash"])
    def test_kernels_are_the_formula(self, name: str, asked: str) -> None:
        wanted = needs(**NEEDS[asked])
        kernel = attention_kernel(name)
        if kernel.missing(**wanted) or (name == "varlen" and not wanted["documents"]):
            pytest.skip("not supported")
        found = compute(name, wanted, "cuda", torch.bfloat16)
        expected = compute("reference", wanted, "cuda", torch.float32)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.float(), theirs, rtol=0.05, atol=0.05)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("heads", [8, 2])
    def test_blocks_of_keys_merge_into_the_whole(self, dtype: torch.dtype, heads: int) -> None:
        """As in a ring of two: own keys under the causal mask, then half of the other rank's for all queries."""
        torch.manual_seed(0)
        q = torch.randn(2, 8, 128, 64, device="cuda")
        k, v = torch.randn(2, 2, heads, 192, 64, device="cuda")
        gradient = torch.randn_like(q)
        exact_q, exact_k, exact_v = (x.clone().requires_grad_() for x in (q, k, v))
        seen = torch.ones(128, 192, dtype=torch.bool, device="cuda").tril(64)
        whole = F.scaled_dot_product_attention(exact_q, exact_k, exact_v, attn_mask=seen, scale=0.1, enable_gqa=True)
        whole.backward(gradient)
        q, k, v, gradient = (x.to(dtype) for x in (q, k, v, gradient))
        earlier, own = (k[:, :, :64], v[:, :, :64]), (k[:, :, 64:], v[:, :, 64:])
        out, lse = attend_block(q, *own, True, 0.1)
        out, lse = merge_blocks(out.float(), lse, *attend_block(q, *earlier, False, 0.1))
        off = 1e-4 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(out, whole.detach(), rtol=off, atol=off)
        rounded = out.to(dtype)
        grads = [
            attend_block_backward(gradient, q, *part, rounded, lse, causal, 0.1)
            for part, causal in ((earlier, False), (own, True))
        ]
        torch.testing.assert_close((grads[0][0] + grads[1][0]).float(), exact_q.grad, rtol=off, atol=off)
        for i, wanted in ((1, exact_k.grad), (2, exact_v.grad)):
            found = torch.cat([grad[i] for grad in grads], 2).float()
            torch.testing.assert_close(found, wanted, rtol=off, atol=2 * off * wanted.abs().max().item())


@pytest.mark.parametrize(
    ("device", "asked", "name"),
    [
        ("cpu", {}, "SDPA"),
        ("cpu", {"documents": True, "window": True, "alibi": True}, "SDPA"),
        ("cpu", {"softcap": True}, "ReferenceAttention"),
        ("cpu", {"sinks": True}, "ReferenceAttention"),
        ("cuda", {"documents": True, "sinks": True}, "FlexAttention"),
        ("cuda", {}, "SDPA"),
        ("cuda", {"documents": True, "window": True}, "VarlenAttention"),
        ("cuda", {"window": True}, "FlexAttention"),
        ("cuda", {"documents": True, "alibi": True}, "FlexAttention"),
    ],
)
def test_auto_takes_the_fastest_that_fits(device: str, asked: dict[str, bool], name: str) -> None:
    assert type(choose_kernel("auto", torch.device(device), **needs(**asked))).__name__ == name


def test_unknown_names_and_missing_features_are_errors() -> None:
    with pytest.raises(UnknownNameError, match="flexx"):
        attention_kernel("flexx")
    with pytest.raises(UsageError, match="VarlenAttention does not support ALiBi and soft-capping"):
        choose_kernel("varlen", CPU, documents=True, window=False, alibi=True, softcap=True)
    with pytest.raises(UsageError, match="document_ids"):
        build_mask("boundaries", 8, CPU)


def test_a_query_that_may_attend_to_nothing_gets_zeros() -> None:
    q, k, v = (x.detach() for x in inputs("cpu", torch.float32))
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[5] = False
    found = ReferenceAttention()(q, k, v, Mask(dense=mask), scale=0.3)
    assert not found[:, :, 5].any()
    torch.testing.assert_close(found, attention_kernel("sdpa")(q, k, v, Mask(dense=mask), scale=0.3))


def test_every_kernel_says_what_it_can_do() -> None:
    for name in ATTENTION:
        kernel = ATTENTION[name]
        assert kernel.mask_form in ("dense", "boundaries", "block")
        assert kernel.ops_to_save or name == "reference"
        assert kernel.__doc__


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31), st.sampled_from(["flash", "reference"]))
def test_blocks_of_keys_merge_into_the_whole(first: int, second: int, seed: int, name: str) -> None:
    """Output, and gradients from the log-sum-exp over all keys."""
    kernel: Any = attention_kernel(name)
    generator = torch.Generator().manual_seed(seed)
    keys = first + second
    q, k, v = (torch.randn(2, 4, n, 8, generator=generator, requires_grad=True) for n in (5, keys, keys))
    whole = F.scaled_dot_product_attention(q, k, v, scale=0.3)
    gradient = torch.randn(whole.shape, generator=generator)
    whole.backward(gradient)
    with torch.no_grad():
        parts = [(k[:, :, :first], v[:, :, :first]), (k[:, :, first:], v[:, :, first:])]
        (out, lse), more = (kernel.with_log_sum_exp(q, *part, False, 0.3) for part in parts)
        out, lse = merge_blocks(out, lse, *more)
        torch.testing.assert_close(out, whole.detach())
        grads = [kernel.backward(gradient, q, *part, out, lse, False, 0.3) for part in parts]
    torch.testing.assert_close(grads[0][0] + grads[1][0], q.grad, rtol=1e-4, atol=1e-5)
    for i, wanted in ((1, k.grad), (2, v.grad)):
        torch.testing.assert_close(torch.cat([grad[i] for grad in grads], 2), wanted, rtol=1e-4, atol=1e-5)


def test_shared_key_heads_in_blocks() -> None:
    q, k, v = inputs("cpu", torch.float32)
    whole = reference_attention(q, k, v, causal=True, scale=0.3)
    gradient = torch.randn(whole.shape)
    expected = torch.autograd.grad(whole, (q, k, v), gradient)
    with torch.no_grad():
        out, lse = attend_block(q, k, v, True, 0.3)
        torch.testing.assert_close(out, whole)
        found = attend_block_backward(gradient, q, k, v, out, lse, True, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
