"""Paged attention in plain torch: gather the pages of each sequence, then the formula.

With `invariant` every query is computed in products of one fixed shape, over tiles of keys that begin at fixed places,
so that its bits do not depend on the other queries of the step, nor on how the prompt was cut into chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.attention import ScoreOptions
from piledriver.kernels.paged_attention.batch import PagedBatch, Rotation, as_bytes
from piledriver.kernels.paged_attention.pages import page_scales
from piledriver.kernels.registry import Kernel

_TILE_ROWS, _TILE_KEYS = 16, 64


class ReferencePagedAttention(Kernel):
    """The formula, in fp32."""

    def rotates(
        self, projected: Tensor, keys: Tensor, batch: PagedBatch, scores: ScoreOptions, rotation: Rotation
    ) -> bool:
        """Return whether, called with this rotation, it applies it and stores new keys and values before it attends."""
        return False

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        scores: ScoreOptions,
    ) -> Tensor:
        out, start = torch.empty_like(q), 0
        attend = _attend_in_tiles if batch.invariant else attend_row
        for row, (count, context) in enumerate(batch.spans):
            first = 0 if scores.window is None else max(0, context - count - scores.window + 1)
            k, v, first = _gather(keys, values, batch.tables[row], first, context)
            new = slice(start, start + count)
            out[new] = attend(q[new], k, v, context - count - first, scores).to(q.dtype)
            start += count
        if start < len(out):  # padding
            out[start:] = 0
        return out


def _gather(keys: Tensor, values: Tensor, table: Tensor, first: int, context: int) -> tuple[Tensor, Tensor, int]:
    """Return [kv_heads, length, head_dim] keys and values from the tile of `first` up to the context's end."""
    size = keys.shape[2]
    # Whole tiles, so that tiles begin at the same places for every query.
    unit = max(size, _TILE_KEYS)
    first = first // unit * unit
    blocks = table[first // size : -(-context // size)].long()
    pages = (_dense(x, blocks) for x in (keys, values))
    k, v = (x.transpose(0, 1).flatten(1, 2)[:, : context - first] for x in pages)
    return k, v, first


def _dense(pages: Tensor, blocks: Tensor) -> Tensor:
    found = as_bytes(pages)[blocks].view(pages.dtype)
    return found.float() * page_scales(pages)[blocks][..., None] if pages.dtype == torch.int8 else found


def attend_row(q: Tensor, k: Tensor, v: Tensor, past: int, options: ScoreOptions) -> Tensor:
    """Return attention of queries at positions `past`, `past` + 1, ... over keys from position 0."""
    count, heads, dim = q.shape
    k, v = k.to(q.dtype), v.to(q.dtype)
    scale, window, softcap, slopes, sinks = options
    whole = window is None or past + count <= window
    if softcap is None and slopes is None and sinks is None:
        causal = whole and past == 0
        places = torch.arange(past + count, device=q.device)
        mask = None if causal or (whole and count == 1) else _allowed(places[past:, None] - places, window)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=mask,
            is_causal=causal and count > 1,
            scale=scale,
            enable_gqa=heads != k.shape[0],
        )
        return out[0].transpose(0, 1)
    grouped = q.float().view(count, k.shape[0], -1, dim)
    scores = torch.einsum("tkgd,ksd->kgts", grouped, k.float()) * scale
    scores = _change(scores, torch.arange(past, past + count), 0, options)
    if sinks is not None:
        extra = sinks.float().view(k.shape[0], -1, 1, 1).expand(-1, -1, count, 1)
        weights = torch.cat((scores, extra), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("kgts,ksd->tkgd", weights, v.float()).reshape(count, heads, dim)


def _allowed(distance: Tensor, window: int | None) -> Tensor:
    """Return whether a query sees a key that is this many positions before it."""
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _change(scores: Tensor, positions: Tensor, first: int, options: ScoreOptions) -> Tensor:
    """Return [kv_heads, group, queries, keys] scores soft-capped, lowered by ALiBi and masked."""
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance = positions.to(scores.device)[:, None] - torch.arange(
        first, first + scores.shape[-1], device=scores.device
    )
    if options.slopes is not None:
        scores = scores - options.slopes.view(scores.shape[0], -1, 1, 1) * distance
    return scores.masked_fill(~_allowed(distance, options.window), -torch.inf)


def _attend_in_tiles(q: Tensor, k: Tensor, v: Tensor, past: int, options: ScoreOptions) -> Tensor:
    count, heads, dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    at_once = max(1, _TILE_ROWS // group)
    # Whole tiles of keys and of queries; what is added is masked, or dropped.
    missing = -k.shape[1] % _TILE_KEYS
    k, v = (F.pad(x.float(), (0, 0, 0, missing)) for x in (k, v))
    q = F.pad(q.float(), (0, 0, 0, 0, 0, -count % at_once))
    parts = []
    for begin in range(0, len(q), at_once):
        rows = q[begin : begin + at_once].view(at_once, kv_heads, group, dim).permute(1, 2, 0, 3)
        rows = rows.reshape(kv_heads, group * at_once, dim).contiguous()
        positions = torch.arange(past + begin, past + begin + at_once)
        highest = rows.new_full((kv_heads, group * at_once, 1), -torch.inf)
        total, mixed = torch.zeros_like(highest), torch.zeros_like(rows)
        if options.sinks is not None:
            highest = options.sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, at_once, 1).reshape_as(highest)
            total = torch.ones_like(total)
        last = min(k.shape[1], past + begin + at_once)
        lowest = 0 if options.window is None else max(0, past + begin - options.window + 1)
        for tile in range(lowest // _TILE_KEYS * _TILE_KEYS, last, _TILE_KEYS):
            keys = k[:, tile : tile + _TILE_KEYS].contiguous()
            values = v[:, tile : tile + _TILE_KEYS].contiguous()
            scores = torch.bmm(rows, keys.transpose(1, 2)) * options.scale
            scores = _change(scores.view(kv_heads, group, at_once, _TILE_KEYS), positions, tile, options).view(
                kv_heads, group * at_once, _TILE_KEYS
            )
            above = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
            base = above.masked_fill(above == -torch.inf, 0.0)
            weights, kept = (scores - base).exp(), (highest - base).exp()
            total = total * kept + weights.sum(dim=-1, keepdim=True)
            mixed = mixed * kept + torch.bmm(weights, values)
            highest = above
        parts.append((mixed / total).view(kv_heads, group, at_once, dim).permute(2, 0, 1, 3))
    return torch.cat(parts)[:count].reshape(count, heads, dim)
