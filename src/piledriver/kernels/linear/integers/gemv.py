# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""A linear layer of a single row with int8 or int4 weights as a GPU kernel: four products an instruction (`dp4a`).

The input becomes two bytes an element (`split`), in words of four; int4 weights are masked out of their words. No
weight is converted to a float. Loads of the weight come first, the input is prepared while they are under way, and a
warp multiplies whole rows. Programs take several turns at large weights, so that the input is prepared once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options, starts_early
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.quantised_weight import GROUP, QuantisedWeight

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_MOST_COLUMNS = 16384

if triton is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.linear.gemv import finish
    from piledriver.kernels.linear.integers.split import MOST, integer_bits, integer_scale, upper_nibbles

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
        """Return four numbers as a word of high bytes and one of low bytes."""
        p, q, r, s = integer_bits(a, factor), integer_bits(b, factor), integer_bits(c, factor), integer_bits(d, factor)
        low = (p & 255) | ((q & 255) << 8) | ((r & 255) << 16) | (s << 24)
        p, q, r, s = p + 128, q + 128, r + 128, s + 128
        high = ((p >> 8) & 255) | (q & 65280) | ((r & 65280) << 8) | ((s & 65280) << 16)
        return high, low

    @triton.jit
    def _row_sums_8(weight, high, low, ASM: tl.constexpr):
        """Return the sums of rows of int8 words [rows, chunks, lanes] with the input's words [chunks, lanes]."""
        upper = tl.sum(tl.sum(_dp4a(weight, high[None, :, :], tl.zeros_like(weight), ASM), axis=1), axis=1)
        lower = tl.sum(tl.sum(_dp4a(weight, low[None, :, :], tl.zeros_like(weight), ASM), axis=1), axis=1)
        return upper.to(tl.float32) * 256.0 + lower.to(tl.float32)

    @triton.jit
    def _row_sums_4(weight, scales, high, low, more_high, more_low, R: tl.constexpr, CHUNKS: tl.constexpr,
                    ASM: tl.constexpr):  # fmt: skip
        """Return 16 times the sums of rows of int4 words, whose two nibbles a byte meet two words of the input."""
        first, second = upper_nibbles(weight << 4, ASM), upper_nibbles(weight, ASM)
        none = tl.zeros_like(weight)
        upper = _dp4a(second, more_high[None, :, :], _dp4a(first, high[None, :, :], none, ASM), ASM)
        lower = _dp4a(second, more_low[None, :, :], _dp4a(first, low[None, :, :], none, ASM), ASM)
        part = tl.sum(tl.reshape(upper * 256 + lower, [R, CHUNKS, 32, 4]), axis=3)
        return tl.sum(tl.sum(part.to(tl.float32) * scales, axis=1), axis=1)

    @triton.jit
    def _rows_of(index, outputs, GATE: tl.constexpr):
        """Return rows of the weight for outputs; those beyond the last are the first."""
        index = tl.where(index < outputs, index, 0)
        if GATE > 0:
            index = (index // GATE) * 2 * GATE + index % GATE
        return index

    @triton.jit
    def _load(weight, rows, stride, there, WORDS: tl.constexpr, CHUNKS: tl.constexpr):
        """Return [rows, chunks, lanes] of words."""
        wide = tl.arange(0, CHUNKS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
        base = weight + rows.to(tl.int64)[:, None, None] * stride + wide
        if WORDS == CHUNKS * LANES:
            return tl.load(base, mask=there, other=0)
        else:
            return tl.load(base, mask=(wide < WORDS) & there, other=0)

    @triton.jit
    def _load_scales(scales, rows, stride, there, WORDS: tl.constexpr, CHUNKS: tl.constexpr, INT4: tl.constexpr,
                     GROUP_WORDS: tl.constexpr):  # fmt: skip
        """Return the scales of rows, for int4 one for each four words: [rows, chunks, 32]."""
        if INT4:
            groups = (tl.arange(0, CHUNKS)[None, :, None] * LANES + tl.arange(0, 32)[None, None, :] * 4) // GROUP_WORDS
            known = (groups < WORDS // GROUP_WORDS) & there
            return tl.load(scales + rows[:, None, None] * stride + groups, mask=known, other=0.0)
        else:
            return tl.load(scales + rows)

    @triton.jit
    def _integer_gemv(
        x, norm, weight, scales, bias, residual, out, outputs, tiles, eps, weight_stride, scale_stride, columns,
        WORDS: tl.constexpr, INT4: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
        NORM: tl.constexpr, R: tl.constexpr, CHUNKS: tl.constexpr, GROUP_WORDS: tl.constexpr, LOOP: tl.constexpr,
        ASM: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        if EARLY:
            gdc_launch_dependents()
        first = tl.program_id(0)
        even: tl.constexpr = WORDS == CHUNKS * LANES
        rows = _rows_of(first * R + tl.arange(0, R), outputs, GATE)
        w = _load(weight, rows, weight_stride, True, WORDS, CHUNKS)
        scale = _load_scales(scales, rows, scale_stride, True, WORDS, CHUNKS, INT4, GROUP_WORDS)
        if GATE > 0:
            v = _load(weight, rows + GATE, weight_stride, True, WORDS, CHUNKS)
            other_scale = _load_scales(scales, rows + GATE, scale_stride, True, WORDS, CHUNKS, INT4, GROUP_WORDS)
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
        high, low = _words(a, b, c, d, factor)
        if INT4:
            more_high, more_low = _words(e, f, g, h, factor)
        back = peak / MOST / 16.0 if INT4 else peak / MOST
        if NORM:
            back = back * tl.rsqrt(tl.sum(squares) / columns + eps)
        for tile in range(first, tiles, tl.num_programs(0)):
            if LOOP:
                following = tile + tl.num_programs(0)
                # Without `True &`, Triton's interpreter gives it the dtype of the compared numbers, which no mask has.
                there = True & (following < tiles)
                rows = _rows_of(following * R + tl.arange(0, R), outputs, GATE)
                next_w = _load(weight, rows, weight_stride, there, WORDS, CHUNKS)
                next_scale = _load_scales(scales, rows, scale_stride, there, WORDS, CHUNKS, INT4, GROUP_WORDS)
                if GATE > 0:
                    next_v = _load(weight, rows + GATE, weight_stride, there, WORDS, CHUNKS)
                    next_other = _load_scales(scales, rows + GATE, scale_stride, there, WORDS, CHUNKS, INT4,
                                              GROUP_WORDS)  # fmt: skip
            result = tl.zeros([R], tl.float32)
            other = tl.zeros([R], tl.float32)
            if INT4:
                result = _row_sums_4(w, scale.to(tl.float32), high, low, more_high, more_low, R, CHUNKS, ASM)
                if GATE > 0:
                    other = _row_sums_4(v, other_scale.to(tl.float32), high, low, more_high, more_low, R, CHUNKS,
                                        ASM)  # fmt: skip
            else:
                result = _row_sums_8(w, high, low, ASM) * scale.to(tl.float32)
                if GATE > 0:
                    other = _row_sums_8(v, high, low, ASM) * other_scale.to(tl.float32)
            index = tile * R + tl.arange(0, R)
            live = index < outputs
            index = tl.where(live, index, 0)
            finish(result * back, other * back, _rows_of(index, outputs, GATE), index, live, bias, residual, out, GATE,
                   BIAS, RESIDUAL)  # fmt: skip
            if LOOP:
                w, scale = next_w, next_scale
                if GATE > 0:
                    v, other_scale = next_v, next_other


def integer_gemv(
    x: Tensor,
    weight: QuantisedWeight,
    fused: Fused = PRODUCT_ONLY,
    *,
    config: dict[str, int] | None = None,
) -> Tensor:
    """Return the linear layer of [1, columns] with an int8 or int4 weight."""
    norm, eps, bias, gate_block, residual = fused
    columns = x.shape[1]
    data, scales, int4 = weight.data.view(torch.int32), weight.scales, weight.kind == "int4"
    outputs = data.shape[0] // 2 if gate_block else data.shape[0]
    words = data.shape[1]
    chosen = config or integer_shape(words, outputs, int4=int4, gate=bool(gate_block))
    numbers = x.view(torch.int64)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    early = starts_early(x.device)
    tiles = triton.cdiv(outputs, chosen["rows"])
    programs = min(tiles, chosen.get("programs", tiles))
    _integer_gemv[(programs,)](
        numbers, numbers if norm is None else norm.view(torch.int64), data, scales, x if bias is None else bias,
        x if residual is None else residual, out, outputs, tiles, eps, data.stride(0), scales.stride(0), columns,
        WORDS=words, INT4=int4, GATE=gate_block, BIAS=bias is not None, RESIDUAL=residual is not None,
        NORM=norm is not None, R=chosen["rows"], CHUNKS=triton.next_power_of_2(triton.cdiv(words, 128)),
        GROUP_WORDS=GROUP // 8, LOOP=programs < tiles, EARLY=early,
        ASM=isinstance(_integer_gemv, triton.runtime.JITFunction), num_stages=1, num_warps=chosen["warps"],
        **launch_options(early),
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


def integer_shape(words: int, outputs: int, *, int4: bool, gate: bool) -> dict[str, int]:
    """Return rows of a program, warps and programs: 32 words of the weight a thread at once.

    Large weights are read in several turns, in which the input is prepared once and the next rows are on their way.
    """
    if gate or words not in (256, 512, 1024):
        words *= 2 if gate else 1
        if words > 1024:
            return {"rows": 2, "warps": 2}
        if words > 512:
            return {"rows": 4, "warps": 4 if gate else 2}
        return {"rows": 8, "warps": 4}
    if words * outputs > 1 << 22 and words == 1024 and not int4:
        return {"rows": 16, "warps": 4}
    if words * outputs > 1 << 22:
        return {"rows": 8, "warps": 4, "programs": 396} if words > 256 else {"rows": 16, "warps": 8, "programs": 264}
    if words == 256:
        return {"rows": 16, "warps": 4} if outputs >= 1 << 13 else {"rows": 8, "warps": 4}
    if int4:
        return {"rows": 8, "warps": 4}
    return {"rows": 16, "warps": 8, "programs": 264} if words == 512 else {"rows": 4, "warps": 4}
