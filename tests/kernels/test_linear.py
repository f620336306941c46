"""Linear layers of inference: quantised weights, fused epilogues, bits that do not depend on the number of rows."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from piledriver.core.errors import UsageError
from piledriver.kernels.decode.cpu import CpuDecode
from piledriver.kernels.decode.native import NativeDecode
from piledriver.kernels.decode.reference import ReferenceDecode
from piledriver.kernels.linear import WeightKind, dequantise_weight, linear, quantise_weight
from piledriver.kernels.linear.few_rows import few_rows_linear
from piledriver.kernels.linear.fused import Fused
from piledriver.kernels.linear.mixed.division import TILE_TOKENS, UNROLLED, divide
from piledriver.kernels.linear.native import NativeLinear
from piledriver.kernels.linear.onednn import OneDnnLinear, forget_packed
from piledriver.kernels.linear.reference import ReferenceLinear
from piledriver.kernels.linear.tuned import tuned_kernel
from piledriver.kernels.native.library import native_library
from piledriver.kernels.paged_attention import Rotation
from tests.kernels.interpreter import interpret

KINDS: list[WeightKind] = ["int8", "int4", "fp8"]
CHECK = """
import torch
from piledriver.kernels.decode.reference import ReferenceDecode
from piledriver.kernels.decode.triton import TritonDecode
from piledriver.kernels.linear import dequantise_weight, quantise_weight
from piledriver.kernels.linear.dequantise import dequantise_integers
from piledriver.kernels.linear.fused import Fused
from piledriver.kernels.linear.gemv import gemv
from piledriver.kernels.linear.integers.gemv import integer_gemv
from piledriver.kernels.linear.invariant_row import invariant_row_linear
from piledriver.kernels.linear.mixed.tiles import mixed
from piledriver.kernels.linear.reference import ReferenceLinear
from piledriver.kernels.linear.embedding_rows import _looked_up, embedding_rows
from piledriver.kernels.linear.triton import TritonLinear
from piledriver.kernels.paged_attention import Rotation
torch.manual_seed(0)
tokens = torch.tensor([[5, 0], [11, 5]])
for kind, dtype in (("int8", torch.float32), ("int8", torch.float16), ("fp8", torch.float32)):
    table = quantise_weight(torch.randn(12, 1100, dtype=dtype), kind)
    assert torch.equal(_looked_up(table, tokens), embedding_rows(table, tokens))
    assert _looked_up(table, tokens + 1)[1, 0].isnan().all()
for rows, outputs, columns in ((1, 128, 1024), (1, 96, 384), (5, 96, 256), (20, 64, 384)):
    x, weight, norm = torch.randn(rows, columns), torch.randn(outputs, columns), torch.randn(columns)
    half = x.bfloat16()
    for kind in ("plain", "int8", "int4", "fp8"):
        given = weight if kind == "plain" else quantise_weight(weight, kind)
        if kind in ("int8", "int4"):
            assert torch.equal(dequantise_integers(given, torch.float32), dequantise_weight(given, torch.float32))
        for fused in (
            Fused(gate_block=16, bias=torch.randn(outputs)),
            Fused(residual=torch.randn(rows, outputs)),
            Fused(norm, 1e-5),
            Fused(norm, 1e-5, gate_block=16),
        ):
            expected = ReferenceLinear()(x, given, fused)
            near = {"rtol": 1e-4, "atol": 1e-3} if kind in ("plain", "fp8") else {"rtol": 2e-3, "atol": 0.1}
            torch.testing.assert_close(TritonLinear()(x, given, fused), expected, **near)
            if rows > 1:
                continue
            if kind in ("plain", "fp8"):
                torch.testing.assert_close(gemv(x, given, fused), expected, rtol=1e-4, atol=1e-2)
                continue
            short = Fused(*(value.bfloat16() if torch.is_tensor(value) else value for value in fused))
            wide = Fused(*(value.float() if torch.is_tensor(value) else value for value in short))
            expected = ReferenceLinear()(half.float(), given, wide)
            for config in (None, {"rows": 4, "warps": 4, "programs": 3}):
                found = integer_gemv(half, given, short, config=config).float()
                torch.testing.assert_close(found, expected, rtol=1e-2, atol=5e-2)
for kind in ("int8", "int4"):
    given, fused = quantise_weight(torch.randn(40, 512), kind), Fused(torch.randn(512), 1e-5, torch.randn(40))
    for bk, parts in ((64, 1), (128, 3)):
        tile = {"bn": 16, "bm": 16, "bk": bk, "parts": parts, "together": 2, "warps": 4, "stages": 2}
        x = torch.randn(40, 512)
        more = fused._replace(residual=torch.randn(40, 40))
        torch.testing.assert_close(mixed(x, given, more, config=tile), ReferenceLinear()(x, given, more),
                                   rtol=1e-4, atol=1e-3)
for outputs, columns in ((96, 384), (32, 4608)):
    x, weight, norm = torch.randn(1, columns), torch.randn(outputs, columns), torch.randn(columns)
    for fused in (
        Fused(norm, 1e-5, torch.randn(outputs), gate_block=16),
        Fused(bias=torch.randn(outputs), residual=torch.randn(1, outputs)),
    ):
        expected = ReferenceLinear()(x, weight, fused)
        torch.testing.assert_close(invariant_row_linear(x, weight, fused), expected, rtol=1e-3, atol=1e-2)
for dim, rotary, norms in ((16, 16, False), (16, 8, True), (24, 24, True), (16, 0, False)):
    projected, table = torch.randn(5, 2 * 5 * dim), torch.randn(50, rotary) if rotary else None
    pages = [torch.zeros(4, 2, 8, dim) for _ in range(4)]
    positions, slots = torch.tensor([3, 4, 10, 11, 49]), torch.tensor([0, 9, 17, 25, 31])
    rotation = Rotation(3, table, *((torch.randn(dim), torch.randn(dim), 1e-5) if norms else ()))
    found = TritonDecode().rotate_and_store(projected, *pages[:2], positions, slots, rotation)
    expected = ReferenceDecode().rotate_and_store(projected, *pages[2:], positions, slots, rotation)
    torch.testing.assert_close((found, *pages[:2]), (expected, *pages[2:]), rtol=1e-5, atol=1e-5)
fields = torch.tensor([[5, 6, 7], [-1, 2, -1], [3, 20, 0], [1, 0, 2], [9, 9, 9]], dtype=torch.int32)
step = (fields, torch.tensor([11, 12, 13]), torch.randperm(30).view(3, 10).int(), 4)
found, expected = (kernel.gather_step(*step, rows=3, width=7) for kernel in (TritonDecode(), ReferenceDecode()))
for mine, theirs in zip(found, expected, strict=True):
    assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype
assert found.tokens.tolist() == [5, 13, 7]
"""


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_are_the_nearest_values(kind: WeightKind) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 256)
    small = quantise_weight(weight, kind)
    error = (dequantise_weight(small, torch.float32) - weight).abs()
    scales = small.scales.float().repeat_interleave(256 // small.scales.shape[1], dim=1)
    assert (error <= scales * (0.5001 if kind != "fp8" else 16.0)).all()
    assert small.shape == (16, 256)
    assert small.data.numel() * small.data.element_size() == weight.numel() * (0.5 if kind == "int4" else 1)


def test_int4_needs_whole_groups() -> None:
    with pytest.raises(UsageError, match="groups of 128"):
        quantise_weight(torch.randn(4, 200), "int4")


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_epilogues_are_the_formula(kind: WeightKind | None) -> None:
    torch.manual_seed(0)
    x, weight, bias, residual = torch.randn(3, 128), torch.randn(64, 128), torch.randn(64), torch.randn(3, 64)
    given: Any = weight if kind is None else quantise_weight(weight, kind)
    plain = weight if kind is None else dequantise_weight(given, torch.float32)
    expected = F.linear(x, plain, bias)
    torch.testing.assert_close(linear(x, given, bias=bias, residual=residual), expected + residual)
    gates, ups = expected.unflatten(-1, (-1, 2, 16)).unbind(-2)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(linear(x, given, bias=bias, gate_block=16), (F.silu(gates) * ups).flatten(-2))
    norm = torch.randn(128)
    normed = F.linear(F.rms_norm(x, (128,), norm, 1e-5), plain)
    torch.testing.assert_close(linear(x, given, norm=norm, eps=1e-5), normed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(50, 96).to(dtype), torch.randn(40, 96).to(dtype)
    whole = linear(x, weight, invariant=True)
    for first, count in ((0, 1), (7, 3), (11, 16), (20, 30)):
        assert torch.equal(linear(x[first : first + count], weight, invariant=True), whole[first : first + count])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_every_number_of_tokens_has_a_kernel_that_exists_and_fills_the_processors(kind: WeightKind) -> None:
    for rows, columns in ((256, 256), (8192, 2048), (5120, 16384)):
        weight = quantise_weight(torch.zeros(rows, columns), kind)
        for tokens in (2, 3, 100, 5000):
            chosen = tuned_kernel(weight, tokens)
            few = ("rows", "pipelined_rows", "streamed_rows")
            assert chosen["kernel"] in (*few, "tiles", "mixed", "warp_specialised", "dequantised")
            assert tuned_kernel(weight, tokens, specialised=False)["kernel"] != "warp_specialised"
            if "bn" in chosen:
                # A part holds whole groups, and matrix instructions take 64 rows of four warps.
                assert chosen["parts"] <= max(1, columns // 256)
                assert chosen["bn"] * 4 >= 64 * chosen["warps"]
    assert tuned_kernel(weight, 1 << 20)["kernel"] == "dequantised"
    small = tuned_kernel(quantise_weight(torch.zeros(8192, 2048), kind), 16)
    assert small["kernel"] == ("pipelined_rows" if kind == "int4" else "streamed_rows")
    # Where the warp-specialised kernel cannot run, a tile is not much larger than the tokens.
    for tokens in (20, 60, 100, 300):
        other = tuned_kernel(quantise_weight(torch.zeros(8192, 2048), kind), tokens, specialised=False)
        assert other["bm"] <= max(32, 2 * tokens)
    # A weight of few tiles goes to the kernel that divides its columns.
    assert tuned_kernel(quantise_weight(torch.zeros(512, 2048), kind), 100)["kernel"] == "warp_specialised"


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(1, 120), st.sampled_from(TILE_TOKENS))
def test_shares_of_late_tiles_are_all_their_columns(tokens: int, tiles: int, pairs: int, bm: int) -> None:
    work = divide(tokens, tiles * 128, pairs, bm, 132)
    assert work.whole + work.late == tiles * -(-tokens // bm)
    if work.late:
        assert work.whole % 132 == 0
        assert work.takers <= 132
        assert (work.takers - 1) * work.share < work.late * pairs <= work.takers * work.share
        # A share is of two tiles at most, and has a whole number of unrolled turns.
        assert work.share < pairs
        assert pairs % UNROLLED or work.share % UNROLLED == 0


def test_the_triton_kernels_are_the_reference() -> None:
    interpret(CHECK)


@pytest.mark.parametrize("rows", [1, 2, 7, 15, 16])
def test_few_rows_on_a_cpu_are_the_same_product(rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(1, rows, 24), torch.randn(40, 24), torch.randn(40)
    with torch.no_grad():
        found = few_rows_linear(x, weight, bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias))
    assert found.is_contiguous()
    assert few_rows_linear(x, weight.requires_grad_()).requires_grad


@torch.no_grad()
@pytest.mark.parametrize("kernel", [OneDnnLinear, NativeLinear])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 40])
def test_products_on_a_cpu_are_the_formula_and_see_changes_of_the_weight(rows: int, kernel: type[OneDnnLinear]) -> None:
    if not kernel.runs_on(torch.device("cpu")):
        pytest.skip("torch without oneDNN, or no C compiler")
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 48), torch.nn.Parameter(torch.randn(64, 48)), torch.randn(64)
    residual, norm = torch.randn(rows, 64), torch.randn(48)
    plain, packed = ReferenceLinear(), kernel()
    for _ in range(2):
        for fused in (Fused(bias=bias, residual=residual), Fused(norm, 1e-5, bias, 16)):
            expected = plain(x, weight, fused)
            torch.testing.assert_close(packed(x, weight, fused), expected, rtol=1e-4, atol=1e-4)
        weight.mul_(-2.0)
    weight.data.mul_(3.0)  # which leaves no trace
    forget_packed([weight])
    torch.testing.assert_close(packed(x, weight), plain(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("gcc"), reason="needs gcc")
def test_c_kernels_compile() -> None:
    assert native_library() is not None, "other tests of the C kernels would be skipped"


@pytest.mark.skipif(not NativeLinear.runs_on(torch.device("cpu")), reason="needs a C compiler")
@pytest.mark.parametrize("rows", [3, 40])
def test_native_products_leave_to_torch_what_they_do_not_cover(rows: int) -> None:
    x, weight, fused = torch.randn(rows, 32, requires_grad=True), torch.randn(64, 32), Fused(gate_block=16)
    NativeLinear()(x, weight, fused).sum().backward()
    expected = torch.autograd.grad(ReferenceLinear()(x, weight, fused).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
    with torch.no_grad():
        for given in (x.bfloat16(), torch.randn(rows, 64)[:, ::2]):
            same_type = weight.to(given.dtype)
            torch.testing.assert_close(
                NativeLinear()(given, same_type, fused), ReferenceLinear()(given, same_type, fused)
            )
        for wrong in (Fused(bias=torch.randn(8)), Fused(torch.randn(8)), Fused(gate_block=24)):
            with pytest.raises(RuntimeError):
                NativeLinear()(x, weight, wrong)
        with pytest.raises(RuntimeError):
            NativeLinear()(x, torch.randn(64, 16))


@torch.no_grad()
@pytest.mark.skipif(not NativeLinear.runs_on(torch.device("cpu")), reason="needs a C compiler")
def test_native_products_of_any_size_are_the_formula_with_bits_of_the_row_alone() -> None:
    torch.manual_seed(0)
    for columns, outputs, gate in ((33, 7, 0), (100, 50, 0), (64, 140, 35)):
        x, weight, fused = torch.randn(8, columns), torch.randn(outputs, columns), Fused(gate_block=gate)
        found = NativeLinear()(x, weight, fused)
        torch.testing.assert_close(found, ReferenceLinear()(x, weight, fused), rtol=1e-4, atol=1e-4)
        for rows in (1, 3, 7):
            assert torch.equal(NativeLinear()(x[:rows], weight, fused), found[:rows])


@torch.no_grad()
@pytest.mark.skipif(not NativeLinear.runs_on(torch.device("cpu")), reason="needs a C compiler")
@given(
    rows=st.one_of(st.integers(1, 40), st.integers(49, 60)),
    outputs=st.sampled_from([1, 7, 50, 140]),
    columns=st.sampled_from([128, 384]),
    form=st.sampled_from(
        [
            *(("int8", None, True), ("fp8", None, True), ("fp8", 128, True)),
            *(("int4", group, even) for group in (32, 64, 128) for even in (False, True)),
        ]
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    fuses=st.booleans(),
)
def test_native_products_with_codes_are_the_formula_with_bits_of_the_row_alone(
    rows: int, outputs: int, columns: int, form: tuple[Any, ...], dtype: torch.dtype, fuses: bool
) -> None:
    generator = torch.Generator().manual_seed(rows + outputs)
    x = torch.randn(rows, columns, generator=generator)
    outputs *= 2 if fuses else 1
    kind, group, symmetric = form
    weight = torch.randn(outputs, columns, generator=generator).to(dtype)
    small = quantise_weight(weight, kind, group=group, symmetric=symmetric)
    fused = Fused()
    if fuses:
        fused = Fused(torch.randn(columns), 1e-5, torch.randn(outputs), outputs // 2, torch.randn(rows, outputs // 2))
    found = NativeLinear()(x, small, fused)
    torch.testing.assert_close(found, ReferenceLinear()(x, small, fused), rtol=1e-4, atol=1e-3)
    short = Fused(*(value.bfloat16() if isinstance(value, torch.Tensor) else value for value in fused))
    half = NativeLinear()(x.bfloat16(), small, short)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), found, rtol=5e-2, atol=5e-2 * float(found.abs().max()))
    first = fused if fused.residual is None else fused._replace(residual=fused.residual[:1])
    if rows <= 4:
        assert torch.equal(NativeLinear()(x[:1], small, first), found[:1])


@torch.no_grad()
@pytest.mark.parametrize("kernel", [CpuDecode, NativeDecode])
def test_decode_operators_on_a_cpu_are_the_reference(kernel: type[CpuDecode]) -> None:
    if not kernel.runs_on(torch.device("cpu")):
        pytest.skip("no C compiler")
    torch.manual_seed(0)
    for dim, rotary in ((16, 16), (16, 8)):
        projected, table = torch.randn(3, 2 * 5 * dim), torch.randn(50, rotary)
        pages = [torch.zeros(4, 2, 8, dim) for _ in range(4)]
        places = torch.tensor([3, 10, 49]), torch.tensor([0, 17, 31])
        found = kernel().rotate_and_store(projected, *pages[:2], *places, Rotation(3, table))
        expected = ReferenceDecode().rotate_and_store(projected, *pages[2:], *places, Rotation(3, table))
        torch.testing.assert_close((found, *pages[:2]), (expected, *pages[2:]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("outputs", "columns", "gate"), [(3072, 2048, 0), (1536, 8960, 0), (1024, 2048, 64), (61, 96, 0)]
)
def test_a_single_row_on_a_gpu_has_the_bits_that_it_has_among_others(outputs: int, columns: int, gate: int) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, columns, device="cuda").bfloat16() for rows in (200, outputs * (2 if gate else 1)))
    norm = torch.rand(columns, device="cuda").bfloat16()
    options: dict[str, Any] = {"norm": norm, "eps": 1e-5, "gate_block": gate, "invariant": True}
    whole = linear(x, weight, **options)
    for at in (0, 7, 199):
        for count in (1, 3, 40):
            first = max(0, at - count + 1)
            assert torch.equal(linear(x[first : at + 1], weight, **options)[-1], whole[at])
