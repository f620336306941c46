"""Build the runner of an engine: size the cache, choose the forward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist

from piledriver.models import Transformer
from piledriver.serve.config import EngineConfig
from piledriver.serve.errors import ServeError
from piledriver.serve.execution.forward import Forward, ModuleForward, TiledForward
from piledriver.serve.execution.fused import FusedForward
from piledriver.serve.execution.inputs import BlockTables
from piledriver.serve.execution.pages import PagedCache, block_bytes
from piledriver.serve.execution.runner import Runner
from piledriver.serve.execution.tensor_parallel.forward import TensorParallelForward
from piledriver.serve.execution.tensor_parallel.load import tensor_parallel_ranks

_CPU_CONTEXTS = 16
_WORKSPACE_BYTES = 2 << 30
"""GPU memory left for activations, logits and graphs."""


def build_runner(model: Transformer, config: EngineConfig) -> tuple[Runner, int]:
    """Return the runner of a model and the number of its cache blocks."""
    weight = next(model.parameters())
    context = min(config.max_context or model.config.max_positions, model.config.max_positions)
    dtype = model.compute_dtype or weight.dtype
    if config.kv_dtype == "fp8":
        dtype = torch.float8_e4m3fn
    ranks = tensor_parallel_ranks(model)
    blocks = _cache_blocks(model, config, context, dtype, weight.device, ranks[1])
    cache = PagedCache(
        model.config, blocks, config.block_size, length=context, device=weight.device, dtype=dtype, ranks=ranks
    )
    width = -(-context // config.block_size)
    tables = BlockTables(config.max_sequences, width, cache.scratch_block)
    forward = choose_forward(model, cache, deterministic=config.deterministic, fused=config.fused)
    if ranks[1] > 1 and ranks[0] == 0:
        forward = TensorParallelForward(forward, weight.device, invariant=config.deterministic)
    graphs = config.cuda_graphs and weight.is_cuda and forward.captured
    return Runner(model, forward, cache, tables, invariant=config.deterministic, graphs=graphs), blocks


def choose_forward(model: Transformer, cache: PagedCache, *, deterministic: bool, fused: bool = True) -> Forward:
    """Return the fastest forward pass that supports a model where it is."""
    weight = next(model.parameters())
    if weight.device.type == "cpu":
        return TiledForward(model, cache) if deterministic else ModuleForward(model, cache)
    if fused and FusedForward.supports(model):
        return FusedForward(model, cache, invariant=deterministic)
    if deterministic:
        raise ServeError(
            f"deterministic mode on {weight.device} serves Llama-like models in 16 bits on one process: RMSNorm, "
            "rotary, gated silu",
            fix="serve this model on a CPU or without deterministic mode, or load it with dtype=torch.bfloat16",
        )
    return ModuleForward(model, cache)


def _cache_blocks(
    model: Transformer, config: EngineConfig, context: int, dtype: torch.dtype, device: torch.device, ranks: int
) -> int:
    size = block_bytes(model.config, config.block_size, dtype, ranks)
    per_context = -(-context // config.block_size)
    if config.cache_tokens:
        blocks = -(-config.cache_tokens // config.block_size)
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        blocks = (free - int(total * (1 - config.memory_fraction)) - _WORKSPACE_BYTES) // size
        blocks = _least(blocks, device) if ranks > 1 else blocks
    else:
        blocks = _CPU_CONTEXTS * per_context
    blocks = min(blocks, config.max_sequences * per_context)
    if blocks < per_context:
        longest = max(blocks, 0) * config.block_size
        raise ServeError(
            f"the cache holds {longest} tokens ({blocks} blocks of {size} bytes), less than one context of {context}",
            fix=f"set max_context to at most {longest}, or raise cache_tokens or memory_fraction",
        )
    return blocks


def _least(count: int, device: torch.device) -> int:
    """Return the smallest count of all ranks, whose caches have the same blocks."""
    found = torch.tensor(count, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return int(found)
