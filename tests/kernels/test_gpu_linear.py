"""Linear layers with quantised weights on a GPU: the product with the weight that they stand for, for any batch."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from piledriver.kernels.linear import WeightKind, dequantise_weight, linear, quantise_weight
from piledriver.kernels.linear.embedding_rows import embedding_rows
from piledriver.kernels.linear.fused import Fused
from piledriver.kernels.linear.mixed.division import TILE_TOKENS
from piledriver.kernels.linear.mixed.pipelined_rows import fits_pipelined_rows, pipelined_rows
from piledriver.kernels.linear.mixed.resident_rows import fits_resident_rows, resident_rows
from piledriver.kernels.linear.mixed.rows import fits_mixed_rows, mixed_rows
from piledriver.kernels.linear.mixed.streamed_rows import fits_streamed_rows, streamed_rows
from piledriver.kernels.linear.mixed.tiles import mixed
from piledriver.kernels.linear.mixed.warp_specialised import fits_warp_specialised, warp_specialised
from piledriver.kernels.quantised_weight import QuantisedWeight
from piledriver.kernels.registry import HAS_TRITON
from tests.engine.gpu import ON_GPU

pytestmark = [*ON_GPU, pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")]


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(
    ("outputs", "columns", "counts"),
    [
        *((1000, 2048, (1, 2, 7, 16, 40, 128, 300, 1100)), (1024, 4096, (1, 16, 64, 300)), (1000, 768, (7, 128))),
        *((1000, 3072, (7, 16, 300)), (512, 2560, (7, 16, 300))),
    ],
)
def test_products_are_those_of_the_dequantised_weight(
    kind: WeightKind, outputs: int, columns: int, counts: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    weight = quantise_weight(torch.randn(outputs, columns, device="cuda", dtype=torch.bfloat16), kind)
    dense = dequantise_weight(weight, torch.float32)
    for rows in counts:
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        expected = F.linear(x.float(), dense)
        for invariant in (False, True):
            found = linear(x, weight, invariant=invariant).float()
            assert (found - expected).abs().max() < 0.01 * expected.abs().max()


_FEW = {
    "rows": (mixed_rows, lambda x, weight, gate: fits_mixed_rows(x, weight)),
    "pipelined_rows": (pipelined_rows, fits_pipelined_rows),
    "resident_rows": (resident_rows, fits_resident_rows),
    "streamed_rows": (streamed_rows, fits_streamed_rows),
}


@pytest.mark.parametrize(
    ("kernel", "kind", "outputs", "columns", "rows", "gate"),
    [
        *(("rows", kind, *shape) for kind in ("int8", "int4") for shape in (
            (1000, 2048, 8, 0), (1024, 4096, 5, 64), (136, 512, 7, 4), (8192, 256, 3, 0)
        )),
        *(("streamed_rows", "int8", *shape) for shape in (
            (1000, 2048, 16, 0), (16960, 1024, 13, 0), (1152, 4096, 11, 32)
        )),
        *(("pipelined_rows", "int4", *shape) for shape in (
            (1000, 2048, 16, 0), (16960, 1024, 13, 0), (1152, 4096, 11, 32), (1000, 4096, 7, 0), (1024, 2048, 8, 64)
        )),
        *(("resident_rows", "int4", *shape) for shape in (
            (1000, 2048, 16, 0), (8192, 2048, 11, 0), (6144, 1024, 13, 0), (40, 2048, 7, 0), (8000, 1024, 8, 0)
        )),
    ],
)  # fmt: skip
def test_a_few_rows_are_the_formula_however_many_there_are(
    kernel: str, kind: WeightKind, outputs: int, columns: int, rows: int, gate: int
) -> None:
    torch.manual_seed(0)
    weight = quantise_weight(torch.randn(outputs, columns, device="cuda", dtype=torch.bfloat16), kind)
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    product, fits = _FEW[kernel]
    if not fits(x, weight, gate):
        pytest.skip("needs Hopper and Gluon")
    least = 3 if rows <= 8 else 9
    bias = 30 * torch.randn(outputs, device="cuda", dtype=torch.bfloat16)
    residual = 30 * torch.randn(rows, outputs // 2 if gate else outputs, device="cuda", dtype=torch.bfloat16)
    expected = F.linear(x.float(), dequantise_weight(weight, torch.float32), bias.float())
    if gate:
        gates, ups = expected.unflatten(-1, (-1, 2, gate)).unbind(-2)  # type: ignore[no-untyped-call]
        expected = (F.silu(gates) * ups).flatten(-2)
    expected = expected + residual.float()
    found = product(x, weight, Fused(bias=bias, gate_block=gate, residual=residual))
    assert (found.float() - expected).abs().max() < 0.01 * expected.abs().max()
    part = product(x[-least:], weight, Fused(bias=bias, gate_block=gate, residual=residual[-least:]))
    assert torch.equal(part, found[-least:])


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("tokens", [*TILE_TOKENS, 72])
def test_warp_specialised_products_have_a_bias_and_a_residual(kind: WeightKind, tokens: int) -> None:
    torch.manual_seed(0)
    for outputs, columns, rows in (
        (1000, 768, 300),
        (1000, 128, 300),
        (136, 4096, 7),
        (2048, 2048, 1024),
        (16896, 256, 100),
        (8704, 4096, 600),
    ):
        weight = quantise_weight(torch.randn(outputs, columns, device="cuda", dtype=torch.bfloat16), kind)
        x, residual = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) for n in (columns, outputs))
        if not fits_warp_specialised(x, weight, residual):
            pytest.skip("needs Hopper and Gluon")
        bias = 30 * torch.randn(outputs, device="cuda", dtype=torch.bfloat16)
        expected = F.linear(x.float(), dequantise_weight(weight, torch.float32), bias.float()) + 30 * residual.float()
        fused = Fused(bias=bias, residual=30 * residual)
        found = warp_specialised(x, weight, fused, config={"bm": tokens})
        assert (found.float() - expected).abs().max() < 0.01 * expected.abs().max()
        assert torch.equal(warp_specialised(x, weight, fused, config={"bm": tokens}), found)


def test_matrix_instructions_take_as_many_tokens_as_tiles_have() -> None:
    weight = quantise_weight(torch.randn(128, 128, device="cuda", dtype=torch.bfloat16), "int8")
    x = torch.randn(72, 128, device="cuda", dtype=torch.bfloat16)
    if not fits_warp_specialised(x, weight, None):
        pytest.skip("needs Hopper and Gluon")
    from piledriver.kernels.linear.mixed.warp_specialised import _warp_specialised  # with Triton only

    warp_specialised(x, weight, config={"bm": 72})
    compiled = [one for caches in _warp_specialised.device_caches.values() for one in caches[0].values()]
    [ptx, *_] = [one.asm["ptx"] for one in compiled if one.name == "warp_specialised_72"]
    assert set(re.findall(r"wgmma\S+n(\d+)k16", ptx)) == {"72"}


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_product_with_the_unit_matrix_is_the_weight_to_the_last_bit(kind: WeightKind) -> None:
    torch.manual_seed(0)
    columns = 512
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.int8 if kind == "int8" else torch.uint8)
    data = codes[torch.randint(256, (960, columns if kind == "int8" else columns // 2), device="cuda")]
    groups = 1 if kind == "int8" else columns // 128
    powers = 2.0 ** torch.linspace(-94, 26, 960 * groups, device="cuda").round().view(960, groups)
    scales = (powers * (1 + torch.rand_like(powers)).clamp(max=1.99)).bfloat16()
    weight, unit = QuantisedWeight(kind, data, scales), torch.eye(columns, device="cuda", dtype=torch.bfloat16)
    expected = dequantise_weight(weight, torch.bfloat16).T
    if not fits_warp_specialised(unit, weight, None):
        pytest.skip("needs Hopper and Gluon")
    tile = {"bn": 64, "bm": 64, "bk": 128, "warps": 4, "stages": 3, "parts": 1}
    for found in (
        *(warp_specialised(unit, weight, config={"bm": tokens}) for tokens in (128, 208, 320)),
        *(mixed(unit, weight, config=tile | {"bm": tokens}) for tokens in (32, 64)),
    ):
        assert torch.equal(found, expected)
    if kind == "int8":
        assert torch.equal(streamed_rows(unit[:16], weight), expected[:16])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rows_of_a_table_are_the_formula(kind: WeightKind) -> None:
    torch.manual_seed(0)
    table = quantise_weight(torch.randn(300, 1100, device="cuda", dtype=torch.bfloat16), kind)
    tokens = torch.randint(300, (3, 7), device="cuda")
    assert torch.equal(embedding_rows(table, tokens), dequantise_weight(table, torch.bfloat16)[tokens])
    assert embedding_rows(table, tokens[:0]).shape == (0, 7, 1100)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_gates_of_any_number_of_rows_are_the_formula(kind: WeightKind) -> None:
    torch.manual_seed(0)
    weight = quantise_weight(torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16), kind)
    dense, norm = dequantise_weight(weight, torch.float32), torch.rand(2048, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 7, 40, 300):
        x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
        normed = F.rms_norm(x.float(), (2048,), norm.float(), 1e-5)
        gates, ups = F.linear(normed, dense).unflatten(-1, (-1, 2, 64)).unbind(-2)  # type: ignore[no-untyped-call]
        expected = (F.silu(gates) * ups).flatten(-2)
        found = linear(x, weight, norm=norm, eps=1e-5, gate_block=64).float()
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_row_has_the_same_bits_in_every_batch_in_deterministic_mode(kind: WeightKind) -> None:
    torch.manual_seed(0)
    weight = quantise_weight(torch.randn(1000, 2048, device="cuda", dtype=torch.bfloat16), kind)
    x = torch.randn(300, 2048, device="cuda", dtype=torch.bfloat16)
    whole = linear(x, weight, invariant=True)
    for first, count in ((0, 1), (7, 3), (11, 16), (20, 60), (100, 150)):
        assert torch.equal(linear(x[first : first + count], weight, invariant=True), whole[first : first + count])
