# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Paged attention as one GPU kernel for prefill, decode and mixtures of both.

A program computes one tile of queries: consecutive new tokens of a sequence times the query heads that share a
key-value head. The context is divided into splits whose results are merged in order; with few queries, several programs
share the splits of a tile and the last one to finish merges them. Masked keys add exact zeros, so a query's result does
not depend on which tile it is in. In invariant mode splits and tiles of keys have a fixed length.

In a decode step the kernel can also rotate the queries and the new key (`Rotation`): the program of the last split
stores the new key and value before it attends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.attention import ScoreOptions
from piledriver.kernels.early_launch import launch_options, processor_count, starts_early
from piledriver.kernels.paged_attention.batch import PagedBatch, Rotation
from piledriver.kernels.paged_attention.pages import scales_offset
from piledriver.kernels.registry import TritonKernel

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_LOG2E = 1.4426950408889634
_INVARIANT_SPLIT = 128
_MAX_SPLITS = 64

if triton is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait, prefetch
    from piledriver.kernels.paged_attention.rows import rotate, round_row

    @triton.jit
    def _rotated(base, members, dims, live, gain, angles, eps, ROTARY: tl.constexpr, NORM: tl.constexpr,
                 DIM: tl.constexpr):  # fmt: skip
        """Return heads of [members, dims] at `base`, normalised if NORM, then rotated."""
        x = tl.load(base + members * DIM + dims, mask=live, other=0.0).to(tl.float32)
        half: tl.constexpr = ROTARY // 2
        partner = tl.where(dims < half, dims + half, tl.where(dims < ROTARY, dims - half, dims))
        other = tl.load(base + members * DIM + partner, mask=live, other=0.0).to(tl.float32)
        if NORM:
            factor = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
            x = x * tl.load(gain + dims, mask=dims < DIM, other=0.0).to(tl.float32) * factor
            other = other * tl.load(gain + partner, mask=dims < DIM, other=0.0).to(tl.float32) * factor
        if ROTARY > 0:
            x = rotate(x, other, dims, angles, ROTARY)
        return x

    @triton.jit
    def _merge(highest, total, mixed, more_highest, more_total, more_mixed):
        """Merge two partial softmax results; explicit fused multiply-adds give the same rounding in every caller."""
        above = tl.maximum(highest, more_highest)
        base = tl.where(above == -float("inf"), 0.0, above)
        kept, new = tl.exp2(highest - base), tl.exp2(more_highest - base)
        total = tl.fma(more_total, new, total * kept)
        mixed = tl.fma(more_mixed, tl.broadcast_to(new[:, None], more_mixed.shape), mixed * kept[:, None])
        return above, total, mixed

    @triton.jit
    def _attend_split(
        queries, keys, values, table, kv_head, positions, slope, begin, end, scale, softcap,
        block_stride, head_stride, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr,
        DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
        SCALES: tl.constexpr, INVARIANT: tl.constexpr,
    ):  # fmt: skip
        """Return highest score, sum and mixed values of keys `begin` to `end`."""
        dims, offsets = tl.arange(0, PADDED), tl.arange(0, KEYS)
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, PADDED], tl.float32)
        for tile in range(begin, end, KEYS):
            place = tile + offsets
            inside = place < end
            block = tl.load(table + place // SIZE, mask=inside, other=0).to(tl.int64)
            page = block * block_stride + kv_head * head_stride
            row = page + (place % SIZE) * DIM
            known = inside[:, None] & (dims < DIM)[None, :]
            k = tl.load(keys + row[:, None] + dims[None, :], mask=known, other=0.0).to(queries.dtype)
            scores = tl.dot(queries, tl.trans(k)) * scale
            if SCALES > 0:
                factors = (page + SCALES) // 4 + place % SIZE
                scores *= tl.load(keys.to(tl.pointer_type(tl.float32)) + factors, mask=inside, other=0.0)[None, :]
            if SOFTCAP:
                # tanh by the exponential function; scale already has the factor 1 / cap.
                scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0))
            distance = positions[:, None] - place[None, :]
            if SLOPES:
                scores = scores - slope[:, None] * distance.to(tl.float32)
            allowed = (distance >= 0) & inside[None, :]
            if WINDOW > 0:
                allowed = allowed & (distance < WINDOW)
            scores = tl.where(allowed, scores, -float("inf"))
            above = tl.maximum(highest, tl.max(scores, axis=1))
            base = tl.where(above == -float("inf"), 0.0, above)
            weights, kept = tl.exp2(scores - base[:, None]), tl.exp2(highest - base)
            if INVARIANT:
                # By the matrix unit, which adds up in one order for every shape of the tile.
                ones = tl.full([KEYS, 16], 1.0, queries.dtype)
                added = tl.max(tl.dot(weights.to(queries.dtype), ones), axis=1)
            else:
                added = tl.sum(weights, axis=1)
            total = tl.fma(total, kept, added)
            v = tl.load(values + row[:, None] + dims[None, :], mask=known, other=0.0).to(queries.dtype)
            if SCALES > 0:
                weights *= tl.load(values.to(tl.pointer_type(tl.float32)) + factors, mask=inside, other=0.0)[None, :]
            mixed = tl.dot(weights.to(queries.dtype), v, mixed * kept[:, None])
            highest = above
        return highest, total, mixed

    # One variant for any number of rows: a served batch has them all.
    @triton.jit(do_not_specialize=["rows", "partial_splits"], do_not_specialize_on_alignment=["starts", "contexts"])
    def _paged_attention(
        q, keys, values, out, partial, counters, tables, starts, contexts, slopes, sinks,
        angles, q_norm, k_norm, eps,
        rows, scale, softcap, split_keys, table_stride, token_stride, out_stride, block_stride, head_stride,
        partial_splits,
        GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
        ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, SCALES: tl.constexpr, WINDOW: tl.constexpr,
        SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, DECODE: tl.constexpr,
        ROTATE: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, INVARIANT: tl.constexpr, EARLY: tl.constexpr,
        LINE: tl.constexpr,
    ):  # fmt: skip
        if EARLY:
            gdc_launch_dependents()
        tile, kv_head, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        programs = tl.num_programs(2)
        if DECODE:
            row = tile
            within = 0
        else:
            # Row r begins at tile starts[r] // BLOCK + r at the earliest; find the last row that does.
            low, high = 0, rows
            while low < high:
                middle = (low + high) // 2
                if tl.load(starts + middle) // BLOCK + middle <= tile:
                    low = middle + 1
                else:
                    high = middle
            row = low - 1
            within = tile - (tl.load(starts + row) // BLOCK + row)
        first = tl.load(starts + row)
        count = tl.load(starts + row + 1) - first
        context = tl.load(contexts + row)
        if EARLY:
            if LINE > 0:  # keys and values of the first split, but for the new token's, which is computed meanwhile
                ahead = program * KEYS + tl.arange(0, KEYS)
                block = tl.load(tables + row.to(tl.int64) * table_stride + ahead // SIZE, mask=ahead < context, other=0)
                near = block.to(tl.int64) * block_stride + kv_head * head_stride + ahead % SIZE * DIM
                prefetch(keys + near[:, None], DIM, LINE)
                prefetch(values + near[:, None], DIM, LINE)
            gdc_wait()  # the projection; what is read above is older than the chain
        if within * BLOCK < count:
            index = tl.arange(0, ROWS)
            token = within * BLOCK + index // GROUP_PADDED
            member = index % GROUP_PADDED
            valid = (token < count) & (member < GROUP)
            head = kv_head * GROUP + member
            positions = context - count + token
            dims = tl.arange(0, PADDED)
            place = (first + token).to(tl.int64) * out_stride + head * DIM
            live = valid[:, None] & (dims < DIM)[None, :]
            if ROTATE:
                base = q + first.to(tl.int64) * token_stride + kv_head * (GROUP + 2) * DIM
                turn = angles + (context - 1).to(tl.int64) * ROTARY
                queries = _rotated(base, member[:, None], dims[None, :], live, q_norm, turn, eps, ROTARY, NORM, DIM)
                queries = queries.to(q.dtype.element_ty)
            else:
                spot = (first + token).to(tl.int64) * token_stride + head * DIM
                queries = tl.load(q + spot[:, None] + dims[None, :], mask=live, other=0.0)
            slope = tl.zeros([ROWS], tl.float32)
            if SLOPES:
                slope = tl.load(slopes + head, mask=valid, other=0.0)
            last = tl.minimum(context, context - count + (within + 1) * BLOCK)
            lowest = 0
            if WINDOW > 0:
                lowest = tl.maximum(0, context - count + within * BLOCK - WINDOW + 1) // KEYS * KEYS
            length = split_keys
            if split_keys == 0:  # an even share for each program
                length = ((last - lowest + programs - 1) // programs + KEYS - 1) // KEYS * KEYS
            first_split = lowest // length
            if split_keys == 0:
                first_split = 0
                origin = lowest
            else:
                origin = first_split * length
            splits = (last - origin + length - 1) // length
            table = tables + row.to(tl.int64) * table_stride
            highest = tl.full([ROWS], -float("inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            mixed = tl.zeros([ROWS, PADDED], tl.float32)
            slot = (tile * tl.num_programs(1) + kv_head).to(tl.int64)
            done = True
            if ROTATE and (splits - 1) % programs == program:
                one = tl.arange(0, 1)[:, None]
                here = (dims < DIM)[None, :] & (one == 0)
                page = tl.load(table + (context - 1) // SIZE).to(tl.int64) * block_stride + kv_head * head_stride
                spot = page + (context - 1) % SIZE * DIM
                key = _rotated(base, GROUP + one, dims[None, :], here, k_norm, turn, eps, ROTARY, NORM, DIM)
                value = tl.load(base + (GROUP + 1) * DIM + one + dims[None, :], mask=here, other=0.0)
                if SCALES > 0:
                    factor = (page + SCALES) // 4 + (context - 1) % SIZE + one
                    key, k_scale = round_row(key)
                    tl.store(keys.to(tl.pointer_type(tl.float32)) + factor, k_scale)
                    value, v_scale = round_row(value.to(tl.float32))
                    tl.store(values.to(tl.pointer_type(tl.float32)) + factor, v_scale)
                tl.store(keys + spot + one + dims[None, :], key.to(keys.dtype.element_ty), mask=here)
                tl.store(values + spot + one + dims[None, :], value.to(values.dtype.element_ty), mask=here)
                tl.debug_barrier()  # this program's own reads of the page follow
            for split in range(program, splits, programs):
                begin = origin + split * length
                end = tl.minimum(begin + length, last)
                m, t, a = _attend_split(
                    queries, keys, values, table, kv_head, positions, slope, tl.maximum(begin, lowest), end, scale,
                    softcap, block_stride, head_stride, WINDOW, SOFTCAP, SLOPES, DIM, PADDED, ROWS, KEYS, SIZE, SCALES,
                    INVARIANT,
                )  # fmt: skip
                if SHARED:
                    store = partial + (slot * partial_splits + split) * ROWS * (PADDED + 2)
                    tl.store(store + index, m)
                    tl.store(store + ROWS + index, t)
                    tl.store(store + 2 * ROWS + index[:, None] * PADDED + dims[None, :], a)
                else:
                    highest, total, mixed = _merge(highest, total, mixed, m, t, a)
            if SHARED:
                active = tl.minimum(programs, splits)
                done = False
                if program < active:
                    tl.debug_barrier()
                    before = tl.atomic_add(counters + slot, 1, sem="acq_rel")
                    done = before == active - 1
                if done:
                    tl.debug_barrier()
                    for split in range(splits):
                        store = partial + (slot * partial_splits + split) * ROWS * (PADDED + 2)
                        m = tl.load(store + index, cache_modifier=".cg")
                        t = tl.load(store + ROWS + index, cache_modifier=".cg")
                        a = tl.load(store + 2 * ROWS + index[:, None] * PADDED + dims[None, :], cache_modifier=".cg")
                        highest, total, mixed = _merge(highest, total, mixed, m, t, a)
                    tl.store(counters + slot, 0)
            if done:
                if SINKS:
                    sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
                    above = tl.maximum(highest, sink)
                    kept = tl.exp2(highest - above)
                    total = tl.fma(total, kept, tl.exp2(sink - above))
                    mixed = mixed * kept[:, None]
                result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
                tl.store(out + place[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=live)


class TritonPagedAttention(TritonKernel):
    """One kernel; its tile shape follows from the number of new tokens."""

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._kept: list[Tensor] = []

    def rotates(
        self, projected: Tensor, keys: Tensor, batch: PagedBatch, scores: ScoreOptions, rotation: Rotation
    ) -> bool:
        """Return whether each sequence has one new token; the sum of a norm has an order of its own in each kernel."""
        return batch.max_new == 1 and (rotation.q_norm is None or not batch.invariant)

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        scores: ScoreOptions,
        *,
        rotation: Rotation | None = None,
    ) -> Tensor:
        tokens = len(q)
        scale, window, softcap, slopes, sinks = scores
        kv_heads, size, dim = keys.shape[1:]
        heads = q.shape[1] if rotation is None else kv_heads * rotation.group
        group = heads // kv_heads
        group_padded, padded = triton.next_power_of_2(group), max(16, triton.next_power_of_2(dim))
        rows, decode = len(batch.contexts), batch.max_new == 1
        tile_rows, tile_keys, warps, stages = _tile(batch.invariant, decode, group_padded, padded)
        block = tile_rows // group_padded
        tiles = rows if decode else tokens // block + rows
        programs = _programs(q.device, tiles * kv_heads, batch.max_context, tile_keys)
        split_keys = _INVARIANT_SPLIT if batch.invariant else 0
        splits = -(-batch.max_context // split_keys) if split_keys else programs
        programs = min(programs, splits)
        shared = programs > 1
        partial, counters = self._workspace(
            q.device, tiles * kv_heads * splits * tile_rows * (padded + 2) if shared else 1, tiles * kv_heads
        )
        out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
        # Scores are in base 2; a soft cap is applied in base e, so the change of base follows it.
        factor, cap = (scale * _LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * _LOG2E)
        unused = batch.contexts
        early = rotation is not None and tokens == 1 and starts_early(q.device)  # between linear layers of one row
        line = 128 // keys.dtype.itemsize  # elements that one prefetch brings
        line = min(line, dim) if dim & (dim - 1) == 0 else 0
        turns = rotation or Rotation(group)
        angles, q_norm, k_norm = turns.table, turns.q_norm, turns.k_norm
        _paged_attention[(tiles, kv_heads, programs)](
            q,
            keys,
            values,
            out,
            partial,
            counters,
            batch.tables,
            batch.starts,
            batch.contexts,
            unused if slopes is None else (slopes.float() * _LOG2E).contiguous(),
            unused if sinks is None else sinks,
            unused if angles is None else angles,
            unused if q_norm is None else q_norm,
            unused if k_norm is None else k_norm,
            turns.eps,
            rows,
            factor,
            cap,
            split_keys,
            batch.tables.stride(0),
            q.stride(0),
            out.stride(0),
            keys.stride(0),
            keys.stride(1),
            splits,
            GROUP=group,
            GROUP_PADDED=group_padded,
            BLOCK=block,
            DIM=dim,
            PADDED=padded,
            ROWS=tile_rows,
            KEYS=tile_keys,
            SIZE=size,
            SCALES=scales_offset(size, dim) if keys.dtype == torch.int8 else 0,
            WINDOW=window or 0,
            SOFTCAP=softcap is not None,
            SLOPES=slopes is not None,
            SINKS=sinks is not None,
            SHARED=shared,
            DECODE=decode,
            ROTATE=rotation is not None,
            ROTARY=0 if angles is None else angles.shape[1],
            NORM=q_norm is not None,
            INVARIANT=batch.invariant,
            EARLY=early,
            LINE=line,
            num_warps=warps,
            num_stages=stages,
            **launch_options(early),
        )
        return out

    def _workspace(self, device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
        """Return partial results and counters, kept between calls: captured graphs hold their addresses."""
        partial, counts = self._workspaces.get(device, (torch.empty(0), torch.empty(0)))
        if partial.numel() < floats or counts.numel() < counters:
            partial = torch.empty(max(floats, 1 << 20, partial.numel()), dtype=torch.float32, device=device)
            counts = torch.zeros(max(counters, 1 << 14, counts.numel()), dtype=torch.int32, device=device)
            self._kept += [partial, counts]
            self._workspaces[device] = partial, counts
        return partial, counts


def _tile(invariant: bool, decode: bool, group: int, padded: int) -> tuple[int, int, int, int]:
    """Return rows and keys of a tile, warps and pipeline stages; in invariant mode the keys are the same for all."""
    keys = 128 if padded <= 64 else 64 if padded <= 128 else 32
    if decode:
        return max(16, group), keys, 4, 3
    if invariant:
        return max(64, group), keys, 4, 2
    return max(128 if padded <= 128 else 64, group), 64 if padded <= 128 else 32, 8 if padded > 64 else 4, 2


def _programs(device: torch.device, tiles: int, context: int, keys: int) -> int:
    """Return how many programs share the context of a tile: enough to fill the device."""
    if device.type != "cuda":
        return 4  # the interpreter
    processors = processor_count(device)
    if tiles < processors:  # short shares: there is room for all of them at once
        return max(1, min(processors // tiles, _MAX_SPLITS, -(-context // keys)))
    return max(1, min(6 * processors // tiles, _MAX_SPLITS, context // (8 * keys)))
