"""DeepSpeed's estimators of model states, with the bytes that this engine places: fp32 weights, gradients and Adam.

`estimate_zero{2,3}_model_states_mem_needs_all_{live,cold}` print a table of options and return its rows. Activations
are not in it; `piledriver plan` predicts them too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from piledriver.engine.blocks import blocks_of

_GIB = 2**30
# Weights, gradients and two moments, in fp32; 16-bit copies of matrices that compute beside offloaded masters.
_WEIGHT, _GRADIENT, _STATES, _HALF = 4, 4, 8, 2


@dataclass(frozen=True, kw_only=True)
class StatesEstimate:
    """Bytes of the model states under one option."""

    option: str
    per_gpu: float
    per_cpu: float
    """Host memory of one node."""


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[StatesEstimate]:
    """Print and return what ZeRO 2 needs for a model in memory (or on the meta device)."""
    total, _ = _counted(model)
    return estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[StatesEstimate]:
    """Print and return what ZeRO 2 needs, by the number of parameters."""
    rows = []
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        name = f"offload_optimizer={'cpu' if offload else 'none'}"
        rows.append(StatesEstimate(option=name, per_gpu=device, per_cpu=host))
    return _printed(2, total_params, None, num_gpus_per_node, num_nodes, rows)


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[float, float]:
    """Return (bytes of a node's host memory, bytes of a device) of ZeRO 2."""
    ranks = num_gpus_per_node * num_nodes
    if cpu_offload:
        host = (_WEIGHT + _GRADIENT + _STATES) * total_params * num_gpus_per_node / ranks
        return host * additional_buffer_factor, _HALF * total_params
    loading = _WEIGHT * total_params * num_gpus_per_node
    return loading * additional_buffer_factor, _WEIGHT * total_params + (_GRADIENT + _STATES) * total_params / ranks


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[StatesEstimate]:
    """Print and return what ZeRO 3 needs for a model in memory (or on the meta device)."""
    total, largest = _counted(model)
    return estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[StatesEstimate]:
    """Print and return what ZeRO 3 needs, by the number of parameters and of those gathered at once."""
    rows = []
    for optimizer, parameters in ((True, True), (True, False), (False, False)):
        host, device, _ = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            optimizer,
            parameters,
            True,
            additional_buffer_factor,
        )
        places = {True: "cpu", False: "none"}
        name = f"offload_param={places[parameters]}, offload_optimizer={places[optimizer]}"
        rows.append(StatesEstimate(option=name, per_gpu=device, per_cpu=host))
    return _printed(3, total_params, largest_layer_params, num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[float, float, float]:
    """Return (bytes of a node's host memory, of a device, of the gathered layer) of ZeRO 3.

    `zero_init` is accepted: models built on the meta device never exist whole.
    """
    ranks = num_gpus_per_node * num_nodes
    gathered = 2.0 * _HALF * largest_layer_params
    mine = total_params / ranks
    host, device = 0.0, gathered
    if cpu_offload:
        host += (_WEIGHT + _GRADIENT + _STATES) * mine * num_gpus_per_node
        device += 0.0 if cpu_offload_params else _WEIGHT * mine
    else:
        device += (_WEIGHT + _GRADIENT + _STATES) * mine
    return host * additional_buffer_factor, device, gathered


def _counted(model: nn.Module) -> tuple[int, int]:
    """Return all parameters, and those of the largest block (or of the largest module where nothing repeats)."""
    total = sum(parameter.numel() for parameter in model.parameters())
    blocks = list(blocks_of(model).values()) or [
        one for one in model.modules() if not any(True for _ in one.children())
    ]
    return total, max((sum(p.numel() for p in block.parameters()) for block in blocks), default=total)


def _printed(
    stage: int, total: int, largest: int | None, per_node: int, nodes: int, rows: list[StatesEstimate]
) -> list[StatesEstimate]:
    about = f"{total / 1e6:.0f}M parameters" + ("" if largest is None else f", {largest / 1e6:.0f}M in a layer")
    print(f"ZeRO {stage}, {nodes} nodes of {per_node} GPUs: {about}. Model states without activations:")
    print("  per CPU  |  per GPU  | options")
    for row in rows:
        print(f"{row.per_cpu / _GIB:8.2f}GB |{row.per_gpu / _GIB:8.2f}GB | {row.option}")
    return rows
