"""Paged attention is attention: over scattered blocks, for prefill and decode, with every change of scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from piledriver.kernels.attention import ScoreOptions, alibi_slopes
from piledriver.kernels.attention.reference import reference_attention
from piledriver.kernels.decode.reference import ReferenceDecode
from piledriver.kernels.paged_attention import (
    PagedBatch,
    Rotation,
    allocate_pages,
    page_bytes,
    paged_attention,
    write_pages,
)
from piledriver.kernels.paged_attention.cpu import CpuPagedAttention
from piledriver.kernels.paged_attention.native import NativePagedAttention
from piledriver.kernels.paged_attention.pages import page_scales
from piledriver.kernels.paged_attention.reference import ReferencePagedAttention
from tests.kernels.interpreter import interpret

CHECK = """
import torch
from piledriver.kernels.attention import ScoreOptions
from piledriver.kernels.decode import rotate_and_attend
from piledriver.kernels.paged_attention import Rotation
from piledriver.kernels.paged_attention.pages import page_scales
from piledriver.kernels.paged_attention.reference import ReferencePagedAttention
from piledriver.kernels.paged_attention.triton import TritonPagedAttention
from tests.kernels.test_paged_attention import SCORES, batch_of, in_int8
torch.manual_seed(0)
for dim, heads, kv_heads, scores in SCORES:
    for spans in (((1, 5), (1, 130), (1, 64)), ((7, 7), (1, 90), (20, 150))):
        q, keys, values, batch = batch_of(spans, heads, kv_heads, dim)
        for invariant in (False, True):
            mode = batch._replace(invariant=invariant)
            found = TritonPagedAttention()(q, keys, values, mode, ScoreOptions(0.3, **scores(heads)))
            expected = ReferencePagedAttention()(q, keys, values, batch, ScoreOptions(0.3, **scores(heads)))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        small = in_int8(keys), in_int8(values)
        found = TritonPagedAttention()(q, *small, batch, ScoreOptions(0.3, **scores(heads)))
        expected = ReferencePagedAttention()(q, *small, batch, ScoreOptions(0.3, **scores(heads)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
for dim, rotary, norms in ((16, 16, False), (16, 8, True), (24, 24, True), (16, 0, False)):
    _, keys, values, batch = batch_of(((1, 5), (1, 130), (1, 64)), 6, 2, dim)
    norm = (torch.randn(dim), torch.randn(dim), 1e-5) if norms else (None, None, 0.0)
    scores = ScoreOptions(0.3, 70)
    rotation = Rotation(3, torch.randn(192, rotary) if rotary else None, *norm)
    places = batch.contexts.long() - 1
    slots = batch.tables[torch.arange(3), places // 16].long() * 16 + places % 16
    projected, pages = torch.randn(3, 2 * 5 * dim), (keys.clone(), values.clone())
    expected = rotate_and_attend(projected, *pages, batch._replace(slots=slots), places, rotation, scores)
    for invariant in (False, True):
        mine, mode = (keys.clone(), values.clone()), batch._replace(invariant=invariant)
        found = TritonPagedAttention()(projected, *mine, mode, scores, rotation=rotation)
        torch.testing.assert_close((found, *mine), (expected, *pages), rtol=1e-4, atol=1e-5)
    pages, mine = ((in_int8(keys), in_int8(values)) for _ in range(2))
    expected = rotate_and_attend(projected, *pages, batch._replace(slots=slots), places, rotation, scores)
    found = TritonPagedAttention()(projected, *mine, batch, scores, rotation=rotation)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(mine, pages):
        torch.testing.assert_close(page_scales(one), page_scales(other))
        assert (one.int() - other.int()).abs().max() <= 1  # a number halfway between two may be rounded to either
"""

# (head_dim, heads, kv_heads, changes of the scores)
SCORES: list[tuple[int, int, int, Any]] = [
    (16, 4, 2, lambda heads: {}),
    (24, 3, 1, lambda heads: {"window": 20}),
    (16, 4, 4, lambda heads: {"softcap": 5.0}),
    (16, 4, 2, lambda heads: {"slopes": torch.tensor(alibi_slopes(heads))}),
    (16, 4, 2, lambda heads: {"sinks": torch.linspace(-1, 1, heads), "window": 40}),
]


def batch_of(
    spans: tuple[tuple[int, int], ...], heads: int, kv_heads: int, dim: int
) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    """Queries, pages in random order and the batch of (new tokens, context) spans."""
    size, width = 16, 12
    keys, values = torch.randn(2, width * len(spans), kv_heads, size, dim)
    tables = torch.randperm(width * len(spans)).view(len(spans), width).int()
    counts = torch.tensor([0, *(count for count, _ in spans)])
    contexts = torch.tensor([context for _, context in spans]).int()
    q = torch.randn(int(counts.sum()), heads, dim)
    longest = max(context for _, context in spans)
    slots = torch.zeros(len(q), dtype=torch.long)
    batch = PagedBatch(tables, counts.cumsum(0).int(), contexts, slots, int(counts.max()), longest, spans)
    return q, keys, values, batch


def in_int8(pages: Tensor) -> Tensor:
    """Return pages with the same rows in int8."""
    small = allocate_pages(*pages.shape, dtype=torch.int8)
    rows = pages.transpose(1, 2).flatten(0, 1)
    write_pages(small, allocate_pages(*pages.shape, dtype=torch.int8), rows, rows, torch.arange(len(rows)))
    return small


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("dim", "heads", "kv_heads", "scores"), SCORES)
def test_paged_attention_is_attention(dim: int, heads: int, kv_heads: int, scores: Any, invariant: bool) -> None:
    torch.manual_seed(0)
    spans = ((1, 5), (7, 7), (1, 130), (20, 150))
    q, keys, values, batch = batch_of(spans, heads, kv_heads, dim)
    changes = scores(heads)
    found = paged_attention(q, keys, values, batch._replace(invariant=invariant), ScoreOptions(0.3, **changes))
    start = 0
    for row, (count, context) in enumerate(spans):
        k, v = (x[batch.tables[row].long()].transpose(0, 1).flatten(1, 2)[None, :, :context] for x in (keys, values))
        distance = torch.arange(context - count, context)[:, None] - torch.arange(context)
        mask = (distance >= 0) & (distance < changes.get("window", 10**6))
        bias = None if "slopes" not in changes else -changes["slopes"][None, :, None, None] * distance
        queries = q[start : start + count].transpose(0, 1)[None]
        if "sinks" in changes:  # one more key, of score `sink` and value 0
            scores_, value = _with_sink(queries, k, v, mask, changes["sinks"])
            expected = scores_ @ value
        else:
            expected = reference_attention(
                queries, k, v, mask=mask, bias=bias, scale=0.3, softcap=changes.get("softcap")
            )
        torch.testing.assert_close(found[start : start + count], expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
        start += count


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("padding", [0, 2])
def test_decode_rows_on_a_cpu_are_the_reference_in_every_layer(window: int | None, padding: int) -> None:
    torch.manual_seed(0)
    q, _, _, batch = batch_of(((1, 5), (1, 130), (1, 64), (1, 1)), 6, 2, 16)
    q, scores = torch.cat((q, torch.randn(padding, 6, 16))), ScoreOptions(0.3, window)
    attention = CpuPagedAttention()
    for _ in range(3):  # layers share what was planned for the batch, not its scores
        keys, values = torch.randn(2, 48, 2, 16, 16)
        found = attention(q, keys, values, batch, scores)
        expected = ReferencePagedAttention()(q, keys, values, batch, scores)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.skipif(not NativePagedAttention.runs_on(torch.device("cpu")), reason="needs a C compiler")
def test_the_native_kernel_rotates_stores_and_attends_as_the_reference() -> None:
    torch.manual_seed(0)
    for dim, rotary, window in ((64, 64, None), (16, 8, 40), (48, 0, 1), (128, 128, 16)):
        _, keys, values, batch = batch_of(((1, 5), (1, 130), (1, 64), (1, 1)), 6, 2, dim)
        rotation, scores = Rotation(3, torch.randn(192, rotary) if rotary else None), ScoreOptions(0.3, window)
        places = batch.contexts.long() - 1
        slots = batch.tables[torch.arange(4), places // 16].long() * 16 + places % 16
        batch = batch._replace(slots=slots)
        projected, pages = torch.randn(4, 2 * 5 * dim), (keys.clone(), values.clone())
        q = ReferenceDecode().rotate_and_store(projected, *pages, places, slots, rotation)
        expected = ReferencePagedAttention()(q, *pages, batch, scores)
        attention = NativePagedAttention()
        assert attention.rotates(projected, keys, batch, scores, rotation)
        found = attention(projected, keys, values, batch, scores, rotation=rotation)
        torch.testing.assert_close((found, keys, values), (expected, *pages), rtol=1e-4, atol=1e-5)


def _with_sink(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-2, -1) * 0.3).masked_fill(~mask, -torch.inf)
    extra = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, extra), dim=-1).softmax(dim=-1)[..., :-1], v


def test_a_query_has_the_same_bits_in_every_batch() -> None:
    torch.manual_seed(0)
    q, keys, values, batch = batch_of(((20, 150), (3, 9)), 4, 2, 16)
    whole = paged_attention(q, keys, values, batch._replace(invariant=True), ScoreOptions(0.3, 70))
    for count, context in ((1, 131), (7, 140), (20, 150)):
        first = 20 - (150 - context) - count
        alone = batch._replace(tables=batch.tables[:1], spans=((count, context),), invariant=True)
        part = paged_attention(q[first : first + count], keys, values, alone, ScoreOptions(0.3, 70))
        assert torch.equal(part, whole[first : first + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pages_hold_what_was_written(dtype: torch.dtype) -> None:
    keys, values = (torch.zeros(4, 2, 8, 16).to(dtype) for _ in range(2))
    k, v = torch.randn(2, 3, 2, 16)
    write_pages(keys, values, k, v, torch.tensor([0, 9, 31]))
    for pages, new in ((keys, k), (values, v)):
        flat = pages.float().transpose(1, 2).flatten(0, 1)
        assert torch.equal(flat[[0, 9, 31]], new.to(dtype).float())
        assert flat.abs().sum(dim=(1, 2)).count_nonzero() == 3


@pytest.mark.parametrize(("size", "width"), [(8, 16), (1, 6), (3, 5)])
def test_int8_pages_hold_rows_within_half_a_step_and_share_no_memory(size: int, width: int) -> None:
    torch.manual_seed(0)
    keys, values = (allocate_pages(4, 2, size, width, dtype=torch.int8) for _ in range(2))
    k, v = torch.randn(2, 4 * size, 2, width) * torch.logspace(-6, 6, 4 * size)[:, None, None]
    k[0, 0] = 0
    write_pages(keys, values, k, v, torch.arange(4 * size))
    for pages, new in ((keys, k), (values, v)):
        found = (pages * page_scales(pages)[..., None]).transpose(1, 2).flatten(0, 1)
        assert ((found - new).abs() <= new.abs().amax(dim=-1, keepdim=True) / 127 * 0.501).all()
        assert pages.untyped_storage().nbytes() == 4 * 2 * page_bytes(size, width, torch.int8)


@pytest.mark.parametrize("invariant", [False, True])
def test_attention_over_int8_pages_is_near_that_over_their_rows(invariant: bool) -> None:
    torch.manual_seed(0)
    q, keys, values, batch = batch_of(((1, 5), (7, 7), (1, 130), (20, 150)), 4, 2, 16)
    batch = batch._replace(invariant=invariant)
    found = paged_attention(q, in_int8(keys), in_int8(values), batch, ScoreOptions(0.3))
    expected = paged_attention(q, keys, values, batch, ScoreOptions(0.3))
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.01


def test_the_triton_kernel_is_the_reference() -> None:
    interpret(CHECK)
