# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""A linear layer of a single row with int8 or int4 weights as a GPU kernel: four products an instruction (`dp4a`).

The input becomes two bytes an element (`integers`), in words of four; int4 weights are masked out of their words. No
weight is converted to a float. Loads of the weight come first, the input is prepared while they are under way, and a
warp multiplies whole rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options, starts_early
from piledriver.kernels.linear.weights import GROUP, QuantisedWeight

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_MOST_COLUMNS = 16384

if triton is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.linear.gemv import finish
    from piledriver.kernels.linear.integers import MOST, ROUND_BITS, integer_bits, integer_scale

    LANES = tl.constexpr(128)  # words of a warp's load: 16 bytes a lane

    @triton.jit
    def _dp4a(a, b, c, ASM: tl.constexpr):
        """Return c plus the products of the four signed bytes of a and b."""
        if ASM:
            return tl.inline_asm_elementwise(
                "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            total = c
            for byte in tl.static_range(4):
                total = total + ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
            return total

    @triton.jit
    def _four(x, words, known, EVEN: tl.constexpr):
        """Return four consecutive bf16 numbers, read as one int64, in fp32."""
        if EVEN:  # noqa: SIM108 - a mask costs instructions
            pair = tl.load(x + words)
        else:
            pair = tl.load(x + words, mask=known, other=0)
        low, high = pair.to(tl.int32), (pair >> 32).to(tl.int32)
        return (
            (low << 16).to(tl.float32, bitcast=True),
            (low & -65536).to(tl.float32, bitcast=True),
            (high << 16).to(tl.float32, bitcast=True),
            (high & -65536).to(tl.float32, bitcast=True),
        )

    @triton.jit
    def _values(x, norm, words, known, NORM: tl.constexpr, EVEN: tl.constexpr):
        """Return four numbers a word, times the weight of the norm; their largest magnitude; the sum of squares."""
        a, b, c, d = _four(x, words, known, EVEN)
        squares = a * a + b * b + c * c + d * d
        if NORM:
            e, f, g, h = _four(norm, words, known, EVEN)
            a, b, c, d = a * e, b * f, c * g, d * h
        most = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        return a, b, c, d, most, squares

    @triton.jit
    def _words(a, b, c, d, factor):
        """Return four numbers as a word of high bytes and one of low bytes, and their sum as integers."""
        p, q, r, s = integer_bits(a, factor), integer_bits(b, factor), integer_bits(c, factor), integer_bits(d, factor)
        low = (p & 255) | ((q & 255) << 8) | ((r & 255) << 16) | (s << 24)
        total = (p - ROUND_BITS) + (q - ROUND_BITS) + (r - ROUND_BITS) + (s - ROUND_BITS)
        p, q, r, s = p + 128, q + 128, r + 128, s + 128
        high = ((p >> 8) & 255) | (q & 65280) | ((r & 65280) << 8) | ((s & 65280) << 16)
        return high, low, total

    @triton.jit
    def _row_sums_8(weight, high, low, ASM: tl.constexpr):
        """Return the sums of rows of int8 words [rows, chunks, lanes] with the input's words [chunks, lanes]."""
        upper = tl.sum(tl.sum(_dp4a(weight, high[None, :, :], tl.zeros_like(weight), ASM), axis=1), axis=1)
        lower = tl.sum(tl.sum(_dp4a(weight, low[None, :, :], tl.zeros_like(weight), ASM), axis=1), axis=1)
        return upper.to(tl.float32) * 256.0 + lower.to(tl.float32)

    @triton.jit
    def _row_sums_4(weight, scales, high, low, more_high, more_low, zero, R: tl.constexpr, CHUNKS: tl.constexpr,
                    ASM: tl.constexpr):  # fmt: skip
        """Return the sums of rows of int4 words, whose low and high nibbles meet two words of the input each."""
        first, second = weight & 0x0F0F0F0F, (weight >> 4) & 0x0F0F0F0F
        upper = _dp4a(second, more_high[None, :, :], _dp4a(first, high[None, :, :], tl.zeros_like(weight), ASM), ASM)
        # Codes are value + 8: `zero` takes the 8 off.
        lower = _dp4a(
            second,
            more_low[None, :, :],
            _dp4a(first, low[None, :, :], zero[None, :, :] + tl.zeros_like(weight), ASM),
            ASM,
        )
        part = tl.sum(tl.reshape(upper * 256 + lower, [R, CHUNKS, 32, 4]), axis=3)
        return tl.sum(tl.sum(part.to(tl.float32) * scales, axis=1), axis=1)

    @triton.jit
    def _integer_gemv(
        x, norm, weight, scales, bias, residual, out, outputs, eps, weight_stride, scale_stride, columns,
        WORDS: tl.constexpr, INT4: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
        NORM: tl.constexpr, R: tl.constexpr, CHUNKS: tl.constexpr, GROUP_WORDS: tl.constexpr, ASM: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        if EARLY:
            gdc_launch_dependents()
        index = tl.program_id(0) * R + tl.arange(0, R)
        live = index < outputs
        index = tl.where(live, index, 0)
        rows = index
        if GATE > 0:
            rows = (index // GATE) * 2 * GATE + index % GATE
        even: tl.constexpr = WORDS == CHUNKS * LANES
        wide = tl.arange(0, CHUNKS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
        base = weight + rows.to(tl.int64)[:, None, None] * weight_stride + wide
        if even:
            w = tl.load(base)
            if GATE > 0:
                v = tl.load(base + GATE * weight_stride)
        else:
            w = tl.load(base, mask=wide < WORDS, other=0)
            if GATE > 0:
                v = tl.load(base + GATE * weight_stride, mask=wide < WORDS, other=0)
        if INT4:
            groups = (tl.arange(0, CHUNKS)[None, :, None] * LANES + tl.arange(0, 32)[None, None, :] * 4) // GROUP_WORDS
            place = scales + rows[:, None, None] * scale_stride + groups
            there = groups < WORDS // GROUP_WORDS
            scale = tl.load(place, mask=there, other=0.0).to(tl.float32)
            if GATE > 0:
                other_scale = tl.load(place + GATE * scale_stride, mask=there, other=0.0).to(tl.float32)
        else:
            scale = tl.load(scales + rows).to(tl.float32)
            if GATE > 0:
                other_scale = tl.load(scales + rows + GATE).to(tl.float32)
        if EARLY:
            gdc_wait()
        words = tl.arange(0, CHUNKS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        known = words < WORDS
        if INT4:
            spots = words // GROUP_WORDS * (2 * GROUP_WORDS) + words % GROUP_WORDS
            a, b, c, d, most, squares = _values(x, norm, spots, known, NORM, even)
            e, f, g, h, more_most, more_squares = _values(x, norm, spots + GROUP_WORDS, known, NORM, even)
            most, squares = tl.maximum(most, more_most), squares + more_squares
        else:
            a, b, c, d, most, squares = _values(x, norm, words, known, NORM, even)
        peak = tl.max(most)
        factor = integer_scale(peak)
        high, low, total = _words(a, b, c, d, factor)
        result = tl.zeros([R], tl.float32)
        other = tl.zeros([R], tl.float32)
        if INT4:
            more_high, more_low, more_total = _words(e, f, g, h, factor)
            zero = (total + more_total) * -8
            result = _row_sums_4(w, scale, high, low, more_high, more_low, zero, R, CHUNKS, ASM)
            if GATE > 0:
                other = _row_sums_4(v, other_scale, high, low, more_high, more_low, zero, R, CHUNKS, ASM)
        else:
            result = _row_sums_8(w, high, low, ASM) * scale
            if GATE > 0:
                other = _row_sums_8(v, high, low, ASM) * other_scale
        back = peak / MOST
        if NORM:
            back = back * tl.rsqrt(tl.sum(squares) / columns + eps)
        finish(result * back, other * back, rows, index, live, bias, residual, out, GATE, BIAS, RESIDUAL)


def integer_gemv(
    x: Tensor,
    weight: QuantisedWeight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate_block: int = 0,
    norm: Tensor | None = None,
    eps: float = 0.0,
    config: dict[str, int] | None = None,
) -> Tensor:
    """Return the linear layer of [1, columns] with an int8 or int4 weight, after an RMS norm if `norm` is given."""
    columns = x.shape[1]
    data, scales, int4 = weight.data.view(torch.int32), weight.scales, weight.kind == "int4"
    outputs = data.shape[0] // 2 if gate_block else data.shape[0]
    words = data.shape[1]
    chosen = config or integer_shape(words, gate=bool(gate_block))
    numbers = x.view(torch.int64)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    early = starts_early(x.device)
    _integer_gemv[(triton.cdiv(outputs, chosen["rows"]),)](
        numbers, numbers if norm is None else norm.view(torch.int64), data, scales, x if bias is None else bias,
        x if residual is None else residual, out, outputs, eps, data.stride(0), scales.stride(0), columns,
        WORDS=words, INT4=int4, GATE=gate_block, BIAS=bias is not None, RESIDUAL=residual is not None,
        NORM=norm is not None, R=chosen["rows"], CHUNKS=triton.next_power_of_2(triton.cdiv(words, 128)),
        GROUP_WORDS=GROUP // 8, ASM=isinstance(_integer_gemv, triton.runtime.JITFunction), EARLY=early,
        num_warps=chosen["warps"], **launch_options(early),
    )  # fmt: skip
    return out


def fits_integer_gemv(x: Tensor, weight: QuantisedWeight, norm: Tensor | None) -> bool:
    """Return whether the kernel takes this input: one row of bf16 in whole words, not too long for the registers."""
    columns = x.shape[1]
    return (
        len(x) == 1
        and x.dtype == torch.bfloat16
        and columns % 16 == 0
        and columns <= _MOST_COLUMNS
        and x.data_ptr() % 8 == 0
        and (norm is None or (norm.dtype == torch.bfloat16 and norm.data_ptr() % 8 == 0))
        and weight.kind in ("int8", "int4")
    )


def integer_shape(words: int, *, gate: bool) -> dict[str, int]:
    """Return rows of a program and warps: 8 to 64 words of the weight a thread."""
    words *= 2 if gate else 1
    if words > 1024:
        return {"rows": 2, "warps": 2}
    if words > 512:
        return {"rows": 4, "warps": 4 if gate else 2}
    return {"rows": 8, "warps": 4}
