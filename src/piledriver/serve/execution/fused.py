"""The fused forward pass: a block in five kernels a decode step over the trained module's own parameters.

It covers the Llama-like shapes (pre-norm RMSNorm, rotary positions, gated silu MLP, optional query-key norm, window and
soft-cap) on a GPU in 16 bits and on a CPU in fp32; other models run through `ModuleForward`. Every kernel treats a
token's row by itself; in invariant mode, on a GPU, also in an order that does not depend on the number of rows. On a
CPU, decode steps of a few sequences run all blocks in one C function.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from piledriver.kernels.attention import ScoreOptions
from piledriver.kernels.decode import rotate_and_attend
from piledriver.kernels.decode.blocks import DecodeBlock, fits_native_decode, fits_native_step, native_decode
from piledriver.kernels.linear import QuantisedWeight, linear
from piledriver.kernels.paged_attention import PagedBatch, Rotation
from piledriver.kernels.registry import HAS_TRITON
from piledriver.models import ModelConfig, Transformer
from piledriver.models.attention.layer import Attention
from piledriver.models.block import Block
from piledriver.models.codes import QuantisedCodes, first_weight
from piledriver.models.feed_forward.mlp import GatedMLP
from piledriver.models.layers import Embedding, Linear, RMSNorm
from piledriver.models.loss import project
from piledriver.models.quantised import QuantisedEmbedding, QuantisedLinear
from piledriver.runtime.dtensor import is_dtensor
from piledriver.serve.execution.pages import PagedCache

# Fields whose values do not matter here, or are handled. Any other field must have its default.
_HANDLED = frozenset(
    {
        *("vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "mlp_dim", "max_positions", "tied"),
        *("rope_theta", "rope_fraction", "rope_scaling", "norm_eps", "qkv_bias", "out_bias", "mlp_bias", "qk_norm"),
        *("attention_softcap", "logit_softcap", "sliding_window", "full_attention_layers", "init_std"),
    }
)


class FusedForward:
    """A `Forward` that runs fused kernels over the parameters of a module."""

    captured: ClassVar[bool] = True

    def __init__(self, model: Transformer, cache: PagedCache, *, invariant: bool) -> None:
        self.model, self.cache, self.invariant = model, cache, invariant
        self._native_blocks = _native_blocks(model, cache)
        """What the C kernel of decode steps reads; empty where it does not cover the model."""

    @staticmethod
    def supports(model: Transformer) -> bool:
        """Return whether the kernels cover every part of this model."""
        config, weight = model.config, first_weight(model)
        dtype = model.compute_dtype or weight.dtype
        on_gpu = HAS_TRITON and weight.is_cuda and dtype in (torch.bfloat16, torch.float16)
        on_cpu = weight.device.type == "cpu" and dtype == torch.float32
        shapes = (
            (on_gpu or on_cpu)
            and not is_dtensor(weight)  # a shard's collectives are hooks of modules
            and weight.dtype == dtype
            and config.qk_norm in ("none", "head")
            and _has_defaults(config)
        )
        if (
            not shapes
            or type(model.embedding) not in (Embedding, QuantisedEmbedding)
            or type(model.norm) is not RMSNorm
        ):
            return False
        if not _is_resident(model, weight.device):
            return False
        return _head(model) is not None and all(_is_plain(cast(Block, block)) for block in model.blocks.values())

    def hidden(self, tokens: Tensor, positions: Tensor, batch: PagedBatch, rows: Tensor | None = None) -> Tensor:
        """See `Forward`."""
        model, config, cache = self.model, self.model.config, self.cache
        eps, invariant = config.norm_eps, self.invariant
        assert model.embedding is not None
        assert model.rotary is not None
        x: Tensor = model.embedding(tokens)
        table = model.rotary.table
        if self._native_blocks and fits_native_step(batch):
            group, scale = config.heads // config.kv_heads, config.attention_scale
            x = native_decode(x, self._native_blocks, batch, table, group=group, scale=scale, eps=eps)
            return x if rows is None else x[rows]
        for layer, module in enumerate(model.blocks.values()):
            block: Any = module
            attention, mlp = block.attention, block.mlp
            keys, values = cache.keys[layer], cache.values[layer]
            q_norm, k_norm = attention.q_norm, attention.k_norm
            qkv, gate_up = attention.qkv, mlp.gate_up
            normed: dict[str, Any] = {"norm": block.attention_norm.weight, "eps": eps, "invariant": invariant}
            mixed = rotate_and_attend(
                linear(x, _weight(qkv), bias=qkv.bias, **normed),
                keys,
                values,
                batch,
                positions,
                Rotation(
                    attention.group,
                    table,
                    None if q_norm is None else q_norm.weight,
                    None if k_norm is None else k_norm.weight,
                    eps,
                ),
                ScoreOptions(config.attention_scale, attention.window, config.attention_softcap),
            )
            if rows is not None and x.is_cpu and len(rows) and layer == len(model.blocks) - 1:
                # Other tokens need no more than their keys and values.
                mixed, x, rows = mixed[rows], x[rows], None
            out, down = attention.out, mlp.down
            x = linear(mixed.flatten(1), _weight(out), bias=out.bias, residual=x, invariant=invariant)
            normed["norm"] = block.mlp_norm.weight
            gated = linear(x, _weight(gate_up), bias=gate_up.bias, gate_block=mlp.block, **normed)
            x = linear(gated, _weight(down), bias=down.bias, residual=x, invariant=invariant)
        return x if rows is None else x[rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Forward`; the final norm is here, for the rows that need it."""
        head, norm, config = _head(self.model), self.model.norm, self.model.config
        assert head is not None
        assert norm is not None
        weight = cast(Tensor, norm.weight)
        logits = linear(hidden, head, norm=weight, eps=config.norm_eps, invariant=self.invariant)
        cap = config.logit_softcap
        return logits if cap is None else (cap * torch.tanh(logits.float() / cap)).to(logits.dtype)


def _has_defaults(config: ModelConfig) -> bool:
    """Return whether every field that the kernels do not handle has its default, new fields included."""
    for field in dataclasses.fields(config):
        if field.name not in _HANDLED and getattr(config, field.name) != field.default:
            return False
    return True


def _is_resident(model: Transformer, device: torch.device) -> bool:
    """Return whether all weights are on the device, and no hook brings or changes them when a module is called."""
    return all(parameter.device == device for parameter in model.parameters()) and not any(
        module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module) for module in model.modules()
    )


def _is_plain(block: Block) -> bool:
    attention, mlp = block.attention, block.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP) or mlp.activation != "silu":
        return False
    norms: list[nn.Module | None] = [block.attention_norm, block.mlp_norm]
    linears: list[nn.Module] = [attention.qkv, attention.out, mlp.gate_up, mlp.down]
    return all(type(norm) is RMSNorm and norm.weight is not None for norm in norms) and all(
        type(layer) in (Linear, QuantisedLinear) for layer in linears
    )


def _native_blocks(model: Transformer, cache: PagedCache) -> list[DecodeBlock]:
    """Return weights and pages for `native_decode`, or nothing if it does not cover the model."""
    config = model.config
    if config.attention_softcap is not None or config.qk_norm != "none" or not cache.keys[0].is_cpu:
        return []
    assert model.rotary is not None
    modules: list[Any] = list(model.blocks.values())
    blocks = [
        DecodeBlock(
            _weight(attention.qkv),
            _weight(attention.out),
            _weight(mlp.gate_up),
            _weight(mlp.down),
            block.attention_norm.weight,
            attention.qkv.bias,
            attention.out.bias,
            block.mlp_norm.weight,
            mlp.gate_up.bias,
            mlp.down.bias,
            keys,
            values,
            attention.window,
            mlp.block,
        )
        for block, keys, values in zip(modules, cache.keys, cache.values, strict=True)
        for attention, mlp in ((block.attention, block.mlp),)
    ]
    return blocks if fits_native_decode(blocks, model.rotary.table, config.heads // config.kv_heads) else []


def _weight(layer: Any) -> Tensor | QuantisedWeight:
    return layer.quantised if isinstance(layer, QuantisedCodes) else cast(Tensor, layer.weight)


def _head(model: Transformer) -> Tensor | QuantisedWeight | None:
    """Return the output weight, or None if the projection is not a plain product."""
    return _weight(model.output_layer()) if model.project is project else None
