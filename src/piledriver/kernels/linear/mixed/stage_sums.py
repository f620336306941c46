# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# mypy: disable-error-code="assignment"
# ruff: noqa: N803, N806, RUF005
"""How a group of four warps of the warp-specialised kernel turns stages of shared memory into sums.

A stage has codes of 128 outputs and one or two halves of 64 columns, and as many columns of the tokens. Codes of int4
are of 128 columns: stages of one half share them in twos.

Matrix instructions take 64 outputs of a stage from registers, where codes become bf16, and the tokens from shared
memory. A stage is converted while the one before is multiplied. Two groups with 64 outputs each may alternate, as in
the ping-pong schedule of FlashAttention-3: one begins the products of a stage only after the other has.

A barrier of `ready` tells that a stage is there, one for each place. The very first stage has further ones, so that
work on its parts begins before all are there: barrier `STAGES` is that of its codes, `STAGES` + 1 of the first of two
halves of its tokens.
"""

from __future__ import annotations

try:
    import triton.language as tl
    from triton import constexpr_function
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier
except ImportError:
    gluon = None

if gluon is not None:
    from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

    from piledriver.kernels.linear.mixed.conversions import from_int4, from_int8, int4_factors
    from piledriver.kernels.linear.mixed.token_tiles import padded, pieces_of, width_of

    @constexpr_function
    def layout_of_sums(tokens):
        """Return the layout of [64 outputs, tokens] in four warps."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])

    @constexpr_function
    def layout_of_operand(BM):
        """Return the layout of [64 outputs, 64 columns] of the weight as left operand."""
        return gl.DotOperandLayout(0, layout_of_sums(padded(width_of(BM, 0))), 2)

    @constexpr_function
    def places_of_codes(STAGES, SHARING):
        """Return how many places for codes there are; `SHARING` stages have the same codes."""
        return -(-STAGES // SHARING)

    @gluon.jit
    def place_of_codes(turn, STAGES: gl.constexpr, SHARING: gl.constexpr):
        """Return the place of the codes of a stage."""
        return turn // SHARING % places_of_codes(STAGES, SHARING)

    @gluon.jit
    def _numbers(memory, scale, turn, SIDE: gl.constexpr, INT4: gl.constexpr, BM: gl.constexpr, HALVES: gl.constexpr,
                 STAGES: gl.constexpr, SHARING: gl.constexpr, OPENING: gl.constexpr, HIGH: gl.constexpr):  # fmt: skip
        """Return 64 outputs of a stage in bf16, as left operands of 64 columns each.

        `OPENING`: it may be the first stage. `HIGH`: it is the second that shares codes.
        """
        _, codes, ready, _, _ = memory
        barrier = turn % STAGES
        if OPENING:
            barrier = gl.where(turn == 0, STAGES, barrier)
        mbarrier.wait(ready.index(barrier), turn // STAGES & 1)
        place = place_of_codes(turn, STAGES, SHARING)
        found = ()
        if INT4:
            packed = codes.index(place).slice(SIDE * 64, 64).load(layout_of_operand(BM))
            factors = int4_factors(scale, True)
            for half in gl.static_range(HALVES):
                found = found + (from_int4(packed, factors, packed, HIGH or half == 1, True),)
        else:
            for half in gl.static_range(HALVES):
                some = codes.index(place * HALVES + half).slice(SIDE * 64, 64).load(layout_of_operand(BM))
                found = found + (from_int8(some, some, True),)
        return found

    @gluon.jit
    def _no_sums(TOKENS: gl.constexpr):
        """Return zeros for [64 outputs, tokens]."""
        return gl.zeros([64, TOKENS], gl.float32, layout_of_sums(TOKENS))

    @gluon.jit
    def _add_products(totals, numbers, memory, turn, BM: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
                      OPENING: gl.constexpr):  # fmt: skip
        """Begin to add the products of a stage: a group of instructions for 64 columns of a piece."""
        x_tiles, _, ready, _, _ = memory
        for half in gl.static_range(HALVES):
            if OPENING and turn == 0:
                mbarrier.wait(ready.index(0 if half == HALVES - 1 else STAGES + 1), 0)
            found = ()
            for piece in gl.static_range(pieces_of(BM)):
                tokens = x_tiles[piece].index(turn % STAGES * HALVES + half).permute((1, 0))
                found = found + (warpgroup_mma(numbers[half], tokens, totals[piece], is_async=True),)
            totals = found
        return totals

    @gluon.jit
    def _await_other(memory, turn, SIDE: gl.constexpr):
        """Wait until the other group has begun its products: group 0 for the stage before, group 1 for this one."""
        _, _, _, _, begun = memory
        mbarrier.wait(begun.index(1 - SIDE), (turn + 1 - SIDE) & 1)

    @gluon.jit
    def _tell_other(memory, SIDE: gl.constexpr):
        """Tell the other group that this one has begun its products of a stage."""
        _, _, _, _, begun = memory
        mbarrier.arrive(begun.index(SIDE))

    @gluon.jit
    def _ended(numbers, HALVES: gl.constexpr, PENDING: gl.constexpr):
        """Return left operands once all but the last `PENDING` groups of instructions have ended."""
        if HALVES == 2:
            return warpgroup_mma_wait(PENDING, deps=numbers)
        else:
            return (warpgroup_mma_wait(PENDING, deps=numbers),)

    @gluon.jit
    def _hand_back(memory, turn, STAGES: gl.constexpr):
        """Tell the warp that loads that this group has read a stage."""
        _, _, _, empty, _ = memory
        tl.debug_barrier()
        mbarrier.arrive(empty.index(turn % STAGES))

    @gluon.jit
    def stage_sums(memory, scales, first, turns, SIDE: gl.constexpr, INT4: gl.constexpr, BM: gl.constexpr,
                   HALVES: gl.constexpr, STAGES: gl.constexpr, SHARING: gl.constexpr, UNROLL: gl.constexpr,
                   ALTERNATE: gl.constexpr):  # fmt: skip
        """Return [64, tokens] of each piece of a tile: 64 outputs from `SIDE` * 64 on, times its tokens.

        `scales` are those of the first columns, `first` is the turn that loads them. Only at the end of `UNROLL` turns
        are no matrix instructions in flight. With `ALTERNATE` the groups take turns to begin the products of a stage.
        """
        PIECES: gl.constexpr = pieces_of(BM)
        totals = ()
        for piece in gl.static_range(PIECES):
            totals = totals + (_no_sums(padded(width_of(BM, piece))),)
        scale = gl.load(scales)
        numbers = _numbers(memory, scale, first, SIDE, INT4, BM, HALVES, STAGES, SHARING, True, False)
        scale = gl.load(scales + gl.minimum(1, turns - 1) // SHARING) if INT4 else scale
        for begin in range(0, turns, UNROLL):
            before = numbers
            for step in gl.static_range(UNROLL):
                turn = begin + step
                following = gl.load(scales + gl.minimum(turn + 2, turns - 1) // SHARING) if INT4 else scale
                if ALTERNATE:
                    _await_other(memory, first + turn, SIDE)
                totals = _add_products(totals, numbers, memory, first + turn, BM, HALVES, STAGES, step == 0)
                if ALTERNATE:
                    _tell_other(memory, SIDE)
                # Matrix instructions read registers until they have ended.
                if step > 0:
                    before = _ended(before, HALVES, HALVES * PIECES)
                    _hand_back(memory, first + turn - 1, STAGES)
                before = numbers
                # After the last turn its codes are converted once more, and not used.
                after = turn + 1 if step + 1 < UNROLL else gl.minimum(turn + 1, turns - 1)
                numbers = _numbers(memory, scale, first + after, SIDE, INT4, BM, HALVES, STAGES, SHARING, False,
                                   SHARING == 2 and step % 2 == 0)  # fmt: skip
                scale = following
            totals = warpgroup_mma_wait(0, deps=totals + before)[:PIECES]
            _hand_back(memory, first + begin + UNROLL - 1, STAGES)
        return totals
