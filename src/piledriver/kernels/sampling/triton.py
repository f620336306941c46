# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Sampling as GPU kernels: tiles of the vocabulary are reduced in parallel, one program per row then chooses.

The order of every sum is fixed by the vocabulary, so that a row gives the same token in any batch. Top-k and top-p are
a threshold found by bisection over the bits of the logits, without a sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options, starts_early
from piledriver.kernels.registry import TritonKernel
from piledriver.kernels.sampling.rows import Drawn, RowSettings

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_TILE = 4096

if triton is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait

    @triton.jit
    def _order(x):
        """Map fp32 to int32 of the same order."""
        bits = x.to(tl.int32, bitcast=True)
        return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)

    @triton.jit
    def _value(key):
        bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF)
        return bits.to(tl.float32, bitcast=True)

    # Addresses of values read one by one depend on the number of rows: aligned or not, one variant does.
    @triton.jit(
        do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "thresholds"],
    )
    def _thresholds(logits, temperatures, top_ks, top_ps, min_ps, thresholds, stride, vocab, TILE: tl.constexpr):
        """Find the lowest scaled logit of each row that top-k, top-p and min-p keep."""
        row = tl.program_id(0)
        temperature = tl.load(temperatures + row)
        top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        lowest = tl.full([], -3.0e38, tl.float32)
        threshold = lowest
        if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
            base = logits + row.to(tl.int64) * stride
            offsets = tl.arange(0, TILE)
            highest = tl.full([TILE], -3.0e38, tl.float32)
            for start in range(0, vocab, TILE):
                x = tl.load(base + start + offsets, mask=start + offsets < vocab, other=-3.0e38).to(tl.float32)
                highest = tl.maximum(highest, x / temperature)
            top = tl.max(highest, axis=0)
            if (top_k > 0) & (top_k < vocab):
                low, high = _order(lowest), _order(top)
                while low < high:  # the largest key that at least k logits reach
                    middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
                    count = tl.zeros([TILE], tl.int32)
                    for start in range(0, vocab, TILE):
                        x = tl.load(base + start + offsets, mask=start + offsets < vocab, other=-3.4e38).to(tl.float32)
                        count += (_order(x / temperature) >= middle).to(tl.int32)
                    if tl.sum(count, axis=0) >= top_k:
                        low = middle
                    else:
                        high = middle - 1
                threshold = _value(low)
            if top_p < 1.0:
                mass = tl.zeros([TILE], tl.float32)
                for start in range(0, vocab, TILE):
                    x = tl.load(base + start + offsets, mask=start + offsets < vocab, other=-3.4e38).to(tl.float32)
                    x = x / temperature
                    mass += tl.where(x >= threshold, tl.exp(x - top), 0.0)
                wanted = top_p * tl.sum(mass, axis=0)
                low, high = _order(threshold), _order(top)
                while low < high:  # the largest key whose mass from it upwards reaches p
                    middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
                    mass = tl.zeros([TILE], tl.float32)
                    for start in range(0, vocab, TILE):
                        x = tl.load(base + start + offsets, mask=start + offsets < vocab, other=-3.4e38).to(tl.float32)
                        x = x / temperature
                        mass += tl.where(_order(x) >= middle, tl.exp(x - top), 0.0)
                    if tl.sum(mass, axis=0) >= wanted:
                        low = middle
                    else:
                        high = middle - 1
                threshold = tl.maximum(threshold, _value(low))
            if min_p > 0.0:
                threshold = tl.maximum(threshold, top + tl.log(min_p))
        tl.store(thresholds + row, threshold)

    @triton.jit(do_not_specialize_on_alignment=["temperatures", "thresholds"])
    def _reduce_tiles(
        logits, raw, temperatures, thresholds, best, place, mass, raw_best, raw_mass, stride, raw_stride, vocab,
        tiles, TRUNCATES: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        if EARLY:
            gdc_launch_dependents()
            gdc_wait()
        row, tile = tl.program_id(0), tl.program_id(1)
        offsets = tile * TILE + tl.arange(0, TILE)
        inside = offsets < vocab
        x = tl.load(logits + row.to(tl.int64) * stride + offsets, mask=inside, other=-3.4e38).to(tl.float32)
        temperature = tl.load(temperatures + row)
        y = tl.load(raw + row.to(tl.int64) * raw_stride + offsets, mask=inside, other=-3.4e38).to(tl.float32)
        slot = row * tiles + tile
        top = tl.maximum(tl.max(x, axis=0), -3.0e38)
        tl.store(place + slot, tile * TILE + tl.argmax(x, axis=0))
        tl.store(best + slot, top)
        scaled = x / tl.where(temperature > 0.0, temperature, 1.0)
        scaled_top = top / tl.where(temperature > 0.0, temperature, 1.0)
        weights = tl.where(inside, tl.exp(scaled - scaled_top), 0.0)
        if TRUNCATES:
            weights = tl.where(scaled >= tl.load(thresholds + row), weights, 0.0)
        tl.store(mass + slot, tl.sum(weights, axis=0))
        raw_top = tl.maximum(tl.max(y, axis=0), -3.0e38)
        tl.store(raw_best + slot, raw_top)
        tl.store(raw_mass + slot, tl.sum(tl.where(inside, tl.exp(y - raw_top), 0.0), axis=0))

    @triton.jit
    def _mask_tokens(logits, rows, words, stride, word_stride, vocab, TILE: tl.constexpr):
        row = tl.load(rows + tl.program_id(0)).to(tl.int64)
        offsets = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = offsets < vocab
        word = tl.load(words + tl.program_id(0) * word_stride + offsets // 32, mask=inside, other=-1)
        barred = ((word >> (offsets % 32)) & 1) == 0
        tl.store(logits + row * stride + offsets, -float("inf"), mask=inside & barred)

    @triton.jit(
        do_not_specialize_on_alignment=["temperatures", "uniforms", "thresholds", "tokens", "logprobs", "slots"]
    )
    def _choose(
        logits, raw, temperatures, uniforms, thresholds, best, place, mass, raw_best, raw_mass, tokens, logprobs,
        kept, slots, stride, raw_stride, vocab, tiles, TRUNCATES: tl.constexpr, GIVEN: tl.constexpr,
        KEEP: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        if EARLY:
            gdc_launch_dependents()
            gdc_wait()
        row = tl.program_id(0)
        index = tl.arange(0, TILES)
        there = index < tiles
        top = tl.load(best + row * tiles + index, mask=there, other=-3.0e38)
        temperature = tl.load(temperatures + row)
        token = tl.load(place + row * tiles + tl.argmax(top, axis=0))
        if temperature > 0.0:
            highest = tl.max(top, axis=0)
            weights = tl.load(mass + row * tiles + index, mask=there, other=0.0) * tl.exp((top - highest) / temperature)
            sums = tl.cumsum(weights, axis=0)
            total = tl.max(sums, axis=0)
            point = tl.load(uniforms + row) * total
            # The first tile whose sum passes the point; at the very end, the last one with any mass.
            last = tl.max(tl.where(weights > 0.0, index, 0), axis=0)
            tile = tl.minimum(tl.sum((sums <= point).to(tl.int32), axis=0), last)
            before = tl.max(tl.where(index < tile, sums, 0.0), axis=0)
            offsets = tile * TILE + tl.arange(0, TILE)
            inside = offsets < vocab
            x = tl.load(logits + row.to(tl.int64) * stride + offsets, mask=inside, other=-3.4e38).to(tl.float32)
            scaled = x / temperature
            masses = tl.where(inside, tl.exp(scaled - highest / temperature), 0.0)
            if TRUNCATES:
                masses = tl.where(scaled >= tl.load(thresholds + row), masses, 0.0)
            inner = before + tl.cumsum(masses, axis=0)
            within = tl.arange(0, TILE)
            final = tl.max(tl.where(masses > 0.0, within, 0), axis=0)
            token = tile * TILE + tl.minimum(tl.sum((inner <= point).to(tl.int32), axis=0), final)
            # A token without mass is skipped: the next one that has some.
            later = tl.min(tl.where((masses > 0.0) & (within >= token - tile * TILE), within, TILE), axis=0)
            token = tile * TILE + later
        if GIVEN:
            token = tl.load(tokens + row).to(tl.int32)
        else:
            tl.store(tokens + row, token.to(tl.int64))
            if KEEP:
                tl.store(kept + tl.load(slots + row), token.to(tl.int64))
        tops = tl.load(raw_best + row * tiles + index, mask=there, other=-3.0e38)
        highest = tl.max(tops, axis=0)
        sums = tl.load(raw_mass + row * tiles + index, mask=there, other=0.0) * tl.exp(tops - highest)
        chosen = tl.load(raw + row.to(tl.int64) * raw_stride + token).to(tl.float32)
        tl.store(logprobs + row, chosen - highest - tl.log(tl.sum(sums, axis=0)))


class TritonSampling(TritonKernel):
    """Two kernels; a third one finds thresholds if any row cuts off a part of its distribution."""

    def __call__(
        self, logits: Tensor, settings: RowSettings, raw: Tensor, *, keep: tuple[Tensor, Tensor] | None = None
    ) -> Drawn:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        return self._launch(logits, settings, raw, tokens, given=False, keep=keep)

    def mask_tokens(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """Set logits to -inf where a bit of `words` is 0."""
        vocab = logits.shape[1]
        _mask_tokens[(len(rows), triton.cdiv(vocab, _TILE))](
            logits, rows, words, logits.stride(0), words.stride(0), vocab, TILE=_TILE, num_warps=8
        )

    def token_logprobs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probability of one token for each row."""
        greedy = torch.zeros(len(logits), device=logits.device)
        settings = RowSettings(greedy, greedy, greedy, greedy, greedy, False)
        return self._launch(logits, settings, logits, tokens, given=True).logprobs

    def _launch(
        self,
        logits: Tensor,
        settings: RowSettings,
        raw: Tensor,
        tokens: Tensor,
        *,
        given: bool,
        keep: tuple[Tensor, Tensor] | None = None,
    ) -> Drawn:
        rows, vocab = logits.shape
        tiles = triton.cdiv(vocab, _TILE)
        best, mass, raw_best, raw_mass = torch.empty(4, rows, tiles, dtype=torch.float32, device=logits.device)
        place = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
        thresholds, logprobs = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
        early = rows == 1 and starts_early(logits.device)
        if settings.truncates:
            _thresholds[(rows,)](
                logits, settings.temperature, settings.top_k, settings.top_p, settings.min_p, thresholds,
                logits.stride(0), vocab, TILE=_TILE, num_warps=8,
            )  # fmt: skip
        _reduce_tiles[(rows, tiles)](
            logits, raw, settings.temperature, thresholds, best, place, mass, raw_best, raw_mass,
            logits.stride(0), raw.stride(0), vocab, tiles, TRUNCATES=settings.truncates, TILE=_TILE, EARLY=early,
            num_warps=8, **launch_options(early),
        )  # fmt: skip
        kept, slots = keep or (tokens, tokens)
        _choose[(rows,)](
            logits, raw, settings.temperature, settings.uniform, thresholds, best, place, mass, raw_best, raw_mass,
            tokens, logprobs, kept, slots, logits.stride(0), raw.stride(0), vocab, tiles,
            TRUNCATES=settings.truncates, GIVEN=given, KEEP=keep is not None,
            TILES=triton.next_power_of_2(tiles), TILE=_TILE, EARLY=early, num_warps=8, **launch_options(early),
        )  # fmt: skip
        return Drawn(tokens, logprobs)
