# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# mypy: disable-error-code="assignment"
# ruff: noqa: N803, N806, RUF005
"""What the warp-specialised kernel does with the sums of a tile: adds shares of its columns, and stores the outputs."""

from __future__ import annotations

try:
    import triton.language as tl
    from triton import constexpr_function
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
except ImportError:
    gluon = None

if gluon is not None:
    from piledriver.kernels.linear.mixed.conversions import CODE_UNIT, SCALED_UNIT
    from piledriver.kernels.linear.mixed.stage_sums import layout_of_sums
    from piledriver.kernels.linear.mixed.token_tiles import padded, pieces_of, width_of

    @constexpr_function
    def _order():
        """Return the layout of kept sums: 16 bytes of each lane in turn."""
        return gl.BlockedLayout([4], [32], [4], [0])

    @gluon.jit
    def _places(partial, WIDTH: gl.constexpr):
        """Return where sums of [64, tokens] are kept, and which of them are: those of the first `WIDTH` tokens."""
        place = gl.arange(0, 64 * padded(WIDTH), _order())
        return partial + place, place < 64 * WIDTH

    @gluon.jit
    def _in_order(total, TOKENS: gl.constexpr):
        """Return sums of [64, tokens] as `_places` has them; a lane has two tokens of two outputs, eight apart."""
        total = gl.permute(gl.reshape(total, [4, 2, 8, TOKENS // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
        return gl.convert_layout(gl.reshape(total, [64 * TOKENS]), _order(), assert_trivial=True)

    @gluon.jit
    def _as_sums(flat, TOKENS: gl.constexpr):
        """Undo `_in_order`."""
        total = gl.permute(gl.reshape(flat, [TOKENS // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
        return gl.convert_layout(gl.reshape(total, [64, TOKENS]), layout_of_sums(TOKENS), assert_trivial=True)

    @gluon.jit
    def keep_share(totals, partial, counter, BM: gl.constexpr):
        """Keep the sums of a program's share of a tile, for the program that adds all shares of it."""
        for piece in gl.static_range(pieces_of(BM)):
            place, kept = _places(partial + piece * 64 * 256, width_of(BM, piece))
            gl.store(place, _in_order(totals[piece], padded(width_of(BM, piece))), mask=kept)
        tl.debug_barrier()
        gl.atomic_add(counter, 1, sem="release")

    @gluon.jit
    def add_shares(totals, partial, size, counter, mine, shares, BM: gl.constexpr):
        """Add the sums of all other shares of a tile, in order; `mine` is the number of this one among them.

        `partial` is where sums of the first share are kept, those of share n are `n * size` before it. The counter has
        how many other programs have kept theirs.
        """
        there = gl.atomic_add(counter, 0, sem="acquire")
        while there < shares - 1:
            there = gl.atomic_add(counter, 0, sem="acquire")
        tl.debug_barrier()
        for other in range(shares - 1):
            share = partial - (other + (other >= mine).to(gl.int32)) * size
            found = ()
            for piece in gl.static_range(pieces_of(BM)):
                place, kept = _places(share + piece * 64 * 256, width_of(BM, piece))
                sums = gl.load(place, mask=kept, other=0.0, cache_modifier=".cg")
                found = found + (totals[piece] + _as_sums(sums, padded(width_of(BM, piece))),)
            totals = found
        gl.store(counter, 0)
        return totals

    @gluon.jit
    def _store_lines(total, lines, given, first, token, skipped, RESIDUAL: gl.constexpr, WIDTH: gl.constexpr,
                     TOKENS: gl.constexpr, CHUNK: gl.constexpr):  # fmt: skip
        """Add the residual to outputs of `WIDTH` tokens and store them, 64 outputs of a token as a line of 128 bytes.

        Sums are [outputs, tokens]; they are transposed through `lines` in shared memory, as the residual is.
        """
        if TOKENS > CHUNK:
            # A part at a time, through little shared memory.
            HALF: gl.constexpr = TOKENS // 2
            left, right = gl.split(gl.permute(gl.reshape(total, [64, 2, HALF]), [0, 2, 1]))
            left = gl.convert_layout(left, layout_of_sums(HALF), assert_trivial=True)
            _store_lines(left, lines, given, first, token, skipped, RESIDUAL, min(WIDTH, HALF), HALF, CHUNK)
            if WIDTH > HALF:
                right = gl.convert_layout(right, layout_of_sums(HALF), assert_trivial=True)
                _store_lines(right, lines, given, first, token + HALF, skipped - HALF, RESIDUAL, WIDTH - HALF, HALF,
                             CHUNK)  # fmt: skip
        else:
            _, _, residual, out, _, _, outputs, tokens, _, out_stride, residual_stride = given
            LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            line = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(1, LINES)), 1)
            output = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, LINES)), 0)
            inside = (output < outputs - first) & (line < tokens - token) & (line >= skipped)
            if WIDTH < TOKENS:
                inside &= line < WIDTH
            place = lines.slice(0, TOKENS)
            if RESIDUAL:
                corner = residual + token.to(gl.int64) * residual_stride + first
                place.store(gl.load(corner + line * residual_stride + output, mask=inside, other=0.0))
                total += place.permute((1, 0)).load(layout_of_sums(TOKENS)).to(gl.float32)
            place.permute((1, 0)).store(total.to(gl.bfloat16))
            corner = out + token.to(gl.int64) * out_stride + first
            gl.store(corner + line * out_stride + output, place.load(LINES), mask=inside)

    @gluon.jit
    def rows_of_sums(first, outputs, BM: gl.constexpr):
        """Return 64 outputs from `first` on, as sums have them. Those beyond the last are the last; none is stored."""
        some = gl.arange(0, 64, gl.SliceLayout(1, layout_of_sums(padded(width_of(BM, 0)))))
        return gl.minimum(first + some, outputs - 1)

    @gluon.jit
    def _beside(values, TOKENS: gl.constexpr):
        """Return values of 64 outputs in fp32, as a column beside [64, tokens] of sums."""
        LAYOUT: gl.constexpr = gl.SliceLayout(1, layout_of_sums(TOKENS))
        return gl.expand_dims(gl.convert_layout(values.to(gl.float32), LAYOUT, assert_trivial=True), 1)

    @gluon.jit
    def store_tile(totals, scale, lines, given, first, token, skipped, INT4: gl.constexpr, BIAS: gl.constexpr,
                   RESIDUAL: gl.constexpr, BM: gl.constexpr, CHUNK: gl.constexpr):  # fmt: skip
        """Store 64 outputs from `first` on, of the tokens from `token` on but for `skipped`, which another tile stores.

        Outputs of `CHUNK` tokens at a time are transposed through `lines` in shared memory. `scale`: that of each
        output, of int8.
        """
        _, bias, _, _, _, _, outputs, _, _, _, _ = given
        for piece in gl.static_range(pieces_of(BM)):
            total = totals[piece]
            if INT4:
                total = total * SCALED_UNIT
            else:
                total = total * _beside(scale.to(gl.float32) * CODE_UNIT, padded(width_of(BM, piece)))
            if BIAS:
                total = total + _beside(gl.load(bias + rows_of_sums(first, outputs, BM)), padded(width_of(BM, piece)))
            before = piece * 256
            _store_lines(total, lines, given, first, token + before, skipped - before, RESIDUAL, width_of(BM, piece),
                         padded(width_of(BM, piece)), CHUNK)  # fmt: skip
