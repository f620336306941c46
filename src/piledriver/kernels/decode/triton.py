# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""The elementwise parts of a decode step as GPU kernels: one program per row, or per token and key-value head."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.decode.step import StepTensors
from piledriver.kernels.early_launch import launch_options, starts_early
from piledriver.kernels.paged_attention.batch import Rotation
from piledriver.kernels.paged_attention.pages import scales_offset
from piledriver.kernels.registry import TritonKernel

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.paged_attention.rows import rotate, round_row

    @triton.jit
    def _rms_norm(
        x, weight, out, dim, stride, eps, WEIGHT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        inside = columns < dim
        if EARLY:
            gdc_launch_dependents()
        if WEIGHT:  # a parameter: it is on its way while the kernel waits for the row
            gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        if EARLY:
            gdc_wait()
        row = tl.program_id(0).to(tl.int64)
        value = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, axis=0) / dim + eps)
        if WEIGHT:
            value = value * gain
        tl.store(out + row * dim + columns, value.to(out.dtype.element_ty), mask=inside)

    # Addresses of values read one by one depend on the number of rows: aligned or not, one variant does.
    @triton.jit(do_not_specialize_on_alignment=["tokens", "positions", "contexts", "slots"])
    def _gather_step(
        fields, last_tokens, tables, tokens, positions, contexts, slots, rows_out, stride, table_stride, width,
        SIZE: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        token, source = tl.load(fields + row), tl.load(fields + stride + row)
        position, slot = tl.load(fields + 2 * stride + row), tl.load(fields + 3 * stride + row)
        sampled = tl.load(last_tokens + tl.maximum(source, 0))
        tl.store(tokens + row, tl.where(source >= 0, sampled, token.to(tl.int64)))
        tl.store(positions + row, position.to(tl.int64))
        tl.store(contexts + row, position + 1)
        table = tables + slot.to(tl.int64) * table_stride
        block = tl.load(table + position // SIZE).to(tl.int64)
        tl.store(slots + row, block * SIZE + position % SIZE)
        for start in range(0, width, WIDTH):
            places = start + tl.arange(0, WIDTH)
            blocks = tl.load(table + places, mask=places < width, other=0)
            tl.store(rows_out + row.to(tl.int64) * width + places, blocks, mask=places < width)

    @triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
    def _rotate_and_store(
        projected, table, positions, keys, values, slots, queries, q_norm, k_norm, eps, stride,
        block_stride, head_stride, kv_heads, ROTARY: tl.constexpr, NORM: tl.constexpr, GROUP: tl.constexpr,
        MEMBERS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, SCALES: tl.constexpr,
    ):  # fmt: skip
        token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        member = tl.arange(0, MEMBERS)[:, None]
        dims = tl.arange(0, PADDED)[None, :]
        base = projected + token * stride + head * (GROUP + 2) * DIM
        there = (member < GROUP + 2) & (dims < DIM)
        x = tl.load(base + member * DIM + dims, mask=there, other=0.0).to(tl.float32)
        turned = member <= GROUP  # queries and the key
        if ROTARY > 0:
            half: tl.constexpr = ROTARY // 2
            # Dimension i turns with i + half: the partner is read again, from the first-level cache.
            partner = tl.where(dims < half, dims + half, tl.where(dims < ROTARY, dims - half, dims))
            other = tl.load(base + member * DIM + partner, mask=there & turned, other=0.0).to(tl.float32)
        if NORM:
            factor = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
            gain = tl.load(q_norm + dims, mask=dims < DIM, other=0.0).to(tl.float32)
            key_gain = tl.load(k_norm + dims, mask=dims < DIM, other=0.0).to(tl.float32)
            scale = tl.where(member < GROUP, gain, key_gain) * factor
            x = tl.where(turned, x * scale, x)
            if ROTARY > 0:
                gain = tl.load(q_norm + partner, mask=dims < DIM, other=0.0).to(tl.float32)
                key_gain = tl.load(k_norm + partner, mask=dims < DIM, other=0.0).to(tl.float32)
                other = other * tl.where(member < GROUP, gain, key_gain) * factor
        if ROTARY > 0:
            row = table + tl.load(positions + token).to(tl.int64) * ROTARY
            x = tl.where(turned, rotate(x, other, dims, row, ROTARY), x)
        place = queries + token * kv_heads * GROUP * DIM + head * GROUP * DIM
        tl.store(place + member * DIM + dims, x.to(queries.dtype.element_ty), mask=(member < GROUP) & (dims < DIM))
        slot = tl.load(slots + token)
        page = (slot // SIZE) * block_stride + head * head_stride
        spot = page + (slot % SIZE) * DIM + member * 0 + dims
        if SCALES > 0:
            x, scale = round_row(x)
            factor = (page + SCALES) // 4 + slot % SIZE + member * 0
            tl.store(keys.to(tl.pointer_type(tl.float32)) + factor, scale, mask=member == GROUP)
            tl.store(values.to(tl.pointer_type(tl.float32)) + factor, scale, mask=member == GROUP + 1)
        tl.store(keys + spot, x.to(keys.dtype.element_ty), mask=(member == GROUP) & (dims < DIM))
        tl.store(values + spot, x.to(values.dtype.element_ty), mask=(member == GROUP + 1) & (dims < DIM))


class TritonDecode(TritonKernel):
    """One kernel for each."""

    def gather_step(
        self, fields: Tensor, last_tokens: Tensor, tables: Tensor, size: int, *, rows: int, width: int
    ) -> StepTensors:
        device = fields.device
        tokens, positions, slots = torch.empty(3, rows, dtype=torch.int64, device=device)
        contexts = torch.empty(rows, dtype=torch.int32, device=device)
        blocks = torch.empty(rows, width, dtype=torch.int32, device=device)
        _gather_step[(rows,)](
            fields, last_tokens, tables, tokens, positions, contexts, slots, blocks, fields.stride(0),
            tables.stride(0), width, SIZE=size, WIDTH=min(1024, triton.next_power_of_2(width)), num_warps=1,
        )  # fmt: skip
        return StepTensors(tokens, positions, contexts, slots, blocks)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        rows, dim = x.shape
        out = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
        block = triton.next_power_of_2(dim)
        early = rows == 1 and starts_early(x.device)
        _rms_norm[(rows,)](
            x, x if weight is None else weight, out, dim, x.stride(0), eps,
            WEIGHT=weight is not None, BLOCK=block, EARLY=early, num_warps=4 if block <= 4096 else 8,
            **launch_options(early),
        )  # fmt: skip
        return out

    def rotate_and_store(
        self, projected: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor, rotation: Rotation
    ) -> Tensor:
        group, table, q_norm, k_norm, eps = rotation
        tokens, (kv_heads, size, dim) = projected.shape[0], keys.shape[1:]
        queries = torch.empty(tokens, kv_heads * group, dim, dtype=projected.dtype, device=projected.device)
        norm = q_norm is not None and k_norm is not None
        _rotate_and_store[(tokens, kv_heads)](
            projected, positions if table is None else table, positions, keys, values, slots, queries,
            q_norm if norm else projected, k_norm if norm else projected, eps, projected.stride(0),
            keys.stride(0), keys.stride(1), kv_heads,
            ROTARY=0 if table is None else table.shape[1], NORM=norm, GROUP=group,
            MEMBERS=triton.next_power_of_2(group + 2), DIM=dim, PADDED=triton.next_power_of_2(dim), SIZE=size,
            SCALES=scales_offset(size, dim) if keys.dtype == torch.int8 else 0,
            num_warps=1 if dim * group <= 512 else 4,
        )  # fmt: skip
        return queries
