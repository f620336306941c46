"""Build the runner of an engine: size the cache, choose the forward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist

from piledriver.kernels.native.huge_pages import use_huge_pages
from piledriver.models import Transformer
from piledriver.models.codes import first_weight
from piledriver.runtime.dtensor import is_dtensor
from piledriver.serve.config import EngineConfig
from piledriver.serve.errors import ServeError
from piledriver.serve.execution.forward import Forward, ModuleForward, TiledForward
from piledriver.serve.execution.fused import FusedForward
from piledriver.serve.execution.inputs import BlockTables
from piledriver.serve.execution.pages import PagedCache, block_bytes
from piledriver.serve.execution.runner import Runner
from piledriver.serve.execution.tensor_parallel.forward import TensorParallelForward
from piledriver.serve.execution.tensor_parallel.ranks import tensor_parallel_ranks

_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_CPU_CONTEXTS = 16
_WORKSPACE_BYTES = 2 << 30
"""GPU memory left for activations, logits and graphs."""


def build_runner(model: Transformer, config: EngineConfig) -> tuple[Runner, int]:
    """Return the runner of a model and the number of its cache blocks."""
    weight = first_weight(model)
    context = min(config.max_context or model.config.max_positions, model.config.max_positions)
    dtype = model.compute_dtype or weight.dtype
    dtype = _CACHE_DTYPES.get(config.kv_dtype, dtype)
    ranks = tensor_parallel_ranks(model)
    _use_huge_pages(model)
    blocks = cache_blocks(model, config, context, dtype, weight.device, ranks[1])
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
    tiled = deterministic and first_weight(model).device.type == "cpu"
    if fused and not tiled and FusedForward.supports(model):
        return FusedForward(model, cache, invariant=deterministic)
    return TiledForward(model, cache) if deterministic else ModuleForward(model, cache)


def cache_blocks(
    model: Transformer, config: EngineConfig, context: int, dtype: torch.dtype, device: torch.device, ranks: int
) -> int:
    """Return how many blocks the cache gets; raise `ServeError`, with the arithmetic, if not even one context fits."""
    size = block_bytes(model.config, config.block_size, dtype, ranks)
    per_context = -(-context // config.block_size)
    needed = f"a context of {context} tokens takes {_gib(per_context * size)} of cache"
    if config.cache_tokens:
        blocks = -(-config.cache_tokens // config.block_size)
        have = f"cache_tokens {config.cache_tokens} gives {_gib(blocks * size)}"
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        kept = int(total * (1 - config.memory_fraction))
        blocks = max(0, free - kept - _WORKSPACE_BYTES) // size
        blocks = _least(blocks, device) if ranks > 1 else blocks
        have = (
            f"{device} has {_gib(free)} free of {_gib(total)}, of which {_gib(kept)} stay free (memory_fraction "
            f"{config.memory_fraction}) and {_gib(_WORKSPACE_BYTES)} are workspace"
        )
    else:
        blocks = _CPU_CONTEXTS * per_context
        have = ""
    blocks = min(blocks, config.max_sequences * per_context)
    if blocks < per_context:
        longest = blocks * config.block_size
        shorter = f"set max_context to at most {longest}" if longest else "free memory on the device"
        raise ServeError(f"{needed}; {have}", fix=f"{shorter}, or raise cache_tokens or memory_fraction")
    return blocks


def _use_huge_pages(model: Transformer) -> None:
    """Move weights on a CPU to huge pages: each step reads all of them."""
    for weight in (*model.parameters(), *model.buffers()):
        if weight.device.type == "cpu" and not is_dtensor(weight):
            use_huge_pages(weight.data_ptr(), weight.nbytes)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _least(count: int, device: torch.device) -> int:
    """Return the smallest count of all ranks, whose caches have the same blocks."""
    found = torch.tensor(count, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return int(found)
