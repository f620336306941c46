"""Attention: one function on torch's fused kernels with a plain reference path, and a layer with cache and masks.

Shapes are (batch, length, heads, head_dim). Masks are boolean, True where a query may look, and broadcast to (batch,
heads, queries, keys). A query that may look nowhere gets zeros.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from piledriver.functional.errors import InputShapeError
from piledriver.functional.frame import Initialiser
from piledriver.functional.initialisers import lecun_normal, zeros
from piledriver.functional.layers.dropout import dropped, replicated_like
from piledriver.functional.layers.linear import DenseGeneral, DenseParameters, promoted
from piledriver.functional.layers.positions import first_rotary_tables, rotary_tables, rotate_heads
from piledriver.functional.module import Module
from piledriver.functional.random.keys import Key
from piledriver.functional.transforms.tracing import fused_kernels_lack_a_rule
from piledriver.functional.tree import Path
from piledriver.kernels.attention.reference import reference_attention
from piledriver.kernels.attention.sdpa import sdpa

Implementation = Literal["auto", "fused", "reference"]
_LECUN = lecun_normal()


def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """Return softmax(scores) @ values; fewer key heads than query heads are shared among them (GQA, MQA).

    "auto" takes the fused kernels except where they have no rule: with dropout from a key, under forward-mode or second
    derivatives, and under `vmap` on the CPU. Each rank attends with its own shards of DTensors.
    """
    _check(None, query, key, value, mask, bias)
    if hasattr(query, "placements"):
        from piledriver.functional.partitioning import attend_locally

        if dropout_rate > 0.0:
            # Each rank would draw the numbers of the first heads for its own.
            raise InputShapeError(None, "attention dropout on sharded heads", "set dropout_rate=0 for the attention")
        attend = functools.partial(dot_product_attention, causal=causal, scale=scale, implementation=implementation)
        return attend_locally(attend, query, key, value, mask, bias)
    if implementation == "auto":
        plain = dropout_rate > 0.0 or fused_kernels_lack_a_rule(query.device.type)
        implementation = "reference" if plain else "fused"
    if causal and (mask is not None or bias is not None):
        mask, causal = combine_masks(mask, causal_mask(query.shape[1], key.shape[1], query.device)), False
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if implementation == "reference":
        drop = None
        if dropout_rate > 0.0:
            if dropout_key is None:
                raise InputShapeError(None, "attention dropout without a key", "pass dropout_key=")
            drop = functools.partial(dropped, rate=dropout_rate, key=dropout_key)
        out = reference_attention(q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, drop=drop)
    else:
        allowed = mask
        if bias is not None:
            bias = bias.to(query.dtype)
            allowed = bias if mask is None else torch.where(mask, bias, float("-inf"))
        out = sdpa(q, k, v, allowed, scale, causal=causal)
    return out.transpose(1, 2)


def _check(
    path: Path | None, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None
) -> None:
    """Raise an error for inputs that torch would accept in another meaning, or reject without an explanation."""
    is_odd = query.ndim != 4 or key.ndim != 4 or query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1]
    if is_odd or query.shape[-2] % key.shape[-2]:
        raise InputShapeError(
            path,
            f"attention of queries {tuple(query.shape)}, keys {tuple(key.shape)} and values {tuple(value.shape)}",
            "pass (batch, length, heads, head_dim); heads must be a multiple of key heads, and head sizes and lengths "
            "must agree",
        )
    if not query.dtype == key.dtype == value.dtype:
        raise InputShapeError(
            path, f"queries, keys and values of {query.dtype}, {key.dtype} and {value.dtype}", "cast them to one dtype"
        )
    if mask is not None and mask.dtype != torch.bool:
        # The fused kernels would add such a mask to the scores.
        raise InputShapeError(
            path,
            f"an attention mask of {mask.dtype}",
            "pass booleans, `mask > 0`; pass numbers to add to the scores as bias=",
        )
    wanted = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    for name, one in (("mask", mask), ("bias", bias)):
        if one is not None and not _broadcasts(one.shape, wanted):
            raise InputShapeError(
                path,
                f"an attention {name} of shape {tuple(one.shape)} for {wanted}",
                "give it dims (batch, heads, queries, keys), or 1 where it is the same for all: a padding mask is "
                "(batch, 1, 1, keys)",
            )


def _broadcasts(shape: torch.Size, wanted: tuple[int, ...]) -> bool:
    if len(shape) > len(wanted):
        return False
    return all(size in (1, full) for size, full in zip(reversed(shape), reversed(wanted), strict=False))


def causal_mask(queries: int, keys: int, device: torch.device | None = None, start: int | Tensor = 0) -> Tensor:
    """Return (queries, keys), True where the key is not later than the query; `start` is the first query's position."""
    rows = torch.arange(queries, device=device)[:, None] + start
    return torch.arange(keys, device=device)[None, :] <= rows


def padding_mask(lengths: Tensor, size: int) -> Tensor:
    """Return (batch, 1, 1, size), True for the first `lengths` keys of every example."""
    return (torch.arange(size, device=lengths.device)[None, :] < lengths[:, None])[:, None, None, :]


def attention_mask(query_valid: Tensor, key_valid: Tensor) -> Tensor:
    """Return (batch, 1, queries, keys), True where neither query nor key is padding."""
    return (query_valid[:, :, None] & key_valid[:, None, :])[:, None]


def combine_masks(*masks: Tensor | None) -> Tensor | None:
    """Return the logical and of the masks that are not None."""
    there = [mask for mask in masks if mask is not None]
    return functools.reduce(torch.logical_and, there) if there else None


class MultiHeadAttention(Module):
    """Multi-head attention over (batch, length, features), with grouped key heads, rotary positions and a cache.

    With `decode` it keeps `max_length` keys and values in the collection `cache`; each call appends its tokens, so
    `apply(..., mutable=["cache"])` once on the prompt and then token by token.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    use_bias: bool = True
    causal: bool = False
    rotary_base: float | None = None
    dropout_rate: float = 0.0
    decode: bool = False
    max_length: int = 0
    fuse_projections: bool = False
    implementation: Implementation = "auto"
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _LECUN
    bias_init: Initialiser = zeros
    out_kernel_init: Initialiser | None = None

    def __call__(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        positions: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        deterministic: bool = True,
    ) -> Tensor:
        """Attend from x to itself, or to `context`; `rotary` are rotary tables that the caller has computed already."""
        source = x if context is None else context
        if x.ndim != 3 or source.ndim != 3:
            raise InputShapeError(
                self.path,
                f"attention from {tuple(x.shape)} to {tuple(source.shape)}",
                "pass (batch, length, features); one example is x[None]",
            )
        kv_heads = self.kv_heads or self.heads
        head_dim = self._head_dim(x.shape[-1])
        query, key, value = self._projected(x, source, kv_heads, head_dim)
        if self.decode and hasattr(key, "placements"):
            raise InputShapeError(
                self.path, "decoding with sharded keys", "decode with `whole(variables)` and no sharding"
            )
        if self.rotary_base is not None:
            cos, sin = rotary or self._rotary(positions, x, head_dim)
            if {cos.shape[-2], query.shape[1], key.shape[1]} != {query.shape[1]}:
                raise InputShapeError(
                    self.path,
                    f"{cos.shape[-2]} rotary positions for {query.shape[1]} queries and {key.shape[1]} keys",
                    "give one position for every token; attention to another sequence takes rotary_base=None",
                )
            cos, sin = replicated_like(cos, query), replicated_like(sin, query)
            query, key = rotate_heads(query, cos, sin), rotate_heads(key, cos, sin)
        causal = self.causal
        if self.decode:
            key, value, seen = self._cached(key, value)
            mask, causal = combine_masks(mask, seen), False
        _check(self.path, query, key, value, mask, bias)
        out = dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            causal=causal,
            dropout_rate=0.0 if deterministic else self.dropout_rate,
            dropout_key=self.make_key("dropout") if self.dropout_rate and not deterministic else None,
            implementation=self.implementation,
        )
        self.sow("intermediates", "attention_out", out)
        project = DenseGeneral(
            self.out_features or x.shape[-1],
            (-2, -1),
            self.use_bias,
            self.dtype,
            self.param_dtype,
            self.out_kernel_init or self.kernel_init,
            self.bias_init,
            ("heads", "head_dim", "embed"),
        )
        return self.child("out", project)(out)

    def _rotary(self, positions: Tensor | None, x: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        assert self.rotary_base is not None
        if positions is None:
            if not self.decode:
                return first_rotary_tables(x.shape[1], head_dim, self.rotary_base, x.device)
            held = self._bound_frame("the cache").read("cache", "cache_index")
            positions = torch.arange(x.shape[1], device=x.device) + (0 if held is None else held)
        return rotary_tables(positions, head_dim, self.rotary_base)

    def _head_dim(self, features: int) -> int:
        if self.head_dim is not None:
            return self.head_dim
        if features % self.heads:
            raise InputShapeError(
                self.path, f"{features} features do not divide into {self.heads} heads", "set head_dim"
            )
        return features // self.heads

    def _projected(self, x: Tensor, source: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.fuse_projections and source is x and not self.use_bias:
            return self._fused(x, kv_heads, head_dim)
        shared = (-1, self.use_bias, self.dtype, self.param_dtype, self.kernel_init, self.bias_init)
        queries = DenseGeneral((self.heads, head_dim), *shared, ("embed", "heads", "head_dim"))
        keys = DenseGeneral((kv_heads, head_dim), *shared, ("embed", "kv_heads", "head_dim"))
        return self.child("query", queries)(x), self.child("key", keys)(source), self.child("value", keys)(source)

    def _fused(self, x: Tensor, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the three projections as one matrix product; the parameters stay separate."""
        width = x.shape[-1]
        kernels = []
        for name, heads, axis in (
            ("query", self.heads, "heads"),
            ("key", kv_heads, "kv_heads"),
            ("value", kv_heads, "kv_heads"),
        ):
            axes = ("embed", axis, "head_dim")
            projection = DenseParameters((heads, head_dim), self.param_dtype, self.kernel_init, kernel_axes=axes)
            kernels.append(self.child(name, projection)(width)[0])
        x, *kernels = promoted(self.dtype, x, *kernels)
        joined = torch.matmul(x, torch.cat([kernel.reshape(width, -1) for kernel in kernels], dim=1))
        sizes = [kernel.shape[1] * head_dim for kernel in kernels]
        parts = torch.split(joined, sizes, dim=-1)
        query, key, value = (part.reshape(*part.shape[:-1], -1, head_dim) for part in parts)
        return query, key, value

    def _cached(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.max_length <= 0:
            raise InputShapeError(self.path, "decode without max_length", "set how many tokens the cache holds")
        batch, length, heads, head_dim = key.shape
        shape = (batch, self.max_length, heads, head_dim)
        dtype, device = key.dtype, key.device
        keys = self.variable("cache", "cached_key", lambda: torch.zeros(shape, dtype=dtype, device=device))
        values = self.variable("cache", "cached_value", lambda: torch.zeros(shape, dtype=dtype, device=device))
        index = self.variable("cache", "cache_index", lambda: torch.zeros((), dtype=torch.int64, device=device))
        held, start = keys.value, index.value
        if tuple(held.shape) != shape or held.dtype != dtype:
            raise InputShapeError(
                self.path,
                f"a cache of {held.dtype} {tuple(held.shape)} for keys of {dtype} {tuple(key.shape)}",
                f"`init` with the batch and dtype to decode, and with max_length={self.max_length}",
            )
        at = start + torch.arange(length, device=device)
        try:
            keys.value = held.index_copy(1, at, key)
        except IndexError as error:
            raise InputShapeError(
                self.path,
                f"{length} more tokens after {int(start)} do not fit in a cache of max_length={self.max_length}",
                "raise max_length, or begin again with the cache that `init` returned",
            ) from error
        values.value = values.value.index_copy(1, at, value)
        index.value = start + length
        return keys.value, values.value, causal_mask(length, self.max_length, key.device, start)
