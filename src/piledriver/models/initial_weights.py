"""Weight initialisation: normal, scaled by depth and (under muP) by width, each parameter with its own generator.

A parameter's values depend on (seed, name, shape) and the device type only, not on the order of parameters or on how
the model is sharded: a sharded model starts with the same weights as an unsharded one.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from piledriver.core.random import Stream
from piledriver.models.axes import axes_of
from piledriver.models.config import ModelConfig
from piledriver.models.layers import XIELU
from piledriver.runtime.dtensor import is_dtensor


def initial_std(config: ModelConfig, name: str) -> float | None:
    """Return the standard deviation of one weight, or None for constants (norms, biases, sinks).

    Projections that write to the residual stream shrink with depth (Radford et al., GPT-2, 2019). Under muP hidden
    matrices shrink with the square root of the width; embeddings and output keep theirs.
    """
    axes = axes_of(name)
    if not _is_matrix(name):
        return None
    std = config.init_std
    hidden = not {"vocab", "positions", "router", "gate"} & set(axes)
    if hidden:
        std /= math.sqrt(config.width_multiplier)
    if hidden and axes[-2] == "embed":
        std /= math.sqrt(2 * config.layers)
    return std


def learning_rate_scales(model: nn.Module) -> dict[str, float]:
    """Return the learning-rate factor of each parameter under muP with Adam: 1 / width for hidden matrices, else 1."""
    config: ModelConfig = model.config  # type: ignore[assignment]
    hidden = {"kv_heads", "heads", "mlp"}
    return {
        name: 1.0 / config.width_multiplier if _is_matrix(name) and hidden & set(axes_of(name)) else 1.0
        for name, _ in model.named_parameters()
    }


def initialise(model: nn.Module, seed: int = 0, *, draw_on: torch.device | None = None) -> None:
    """Initialise every parameter of a `Transformer` in place. Of a sharded one, one full parameter exists at a time.

    `draw_on` is the device whose generator draws, by default that of each parameter: with a CPU the weights are the
    same on every kind of device.
    """
    config: ModelConfig = model.config  # type: ignore[assignment]
    # A CPU generator runs on one core: draw several parameters in parallel.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        drawn = []
        for name, parameter in model.named_parameters():
            key = Stream(seed, "initialise", name).below(2**63, 0)
            std = initial_std(config, name)
            constant = _constant(config, name) if std is None else None
            draws = draw_on or parameter.device
            job = partial(_set, parameter, std, constant, key, draws)
            if parameter.device.type == draws.type == "cpu" and not is_dtensor(parameter):
                drawn.append(pool.submit(job))
            else:
                job()
        for one in drawn:
            one.result()


def _is_matrix(name: str) -> bool:
    return len(axes_of(name)) > 1 and not name.endswith("bias")


def _constant(config: ModelConfig, name: str) -> float:
    """Return the initial value of a parameter that is not drawn."""
    *_, module, leaf = name.split(".")
    if module == "xielu":
        return XIELU.initial(leaf)
    # The latent norms have no offset.
    is_scale = leaf == "weight" and not (config.norm_unit_offset and not module.endswith("_a_norm"))
    return 1.0 if is_scale else 0.0


@torch.no_grad()
def _set(parameter: Tensor, std: float | None, constant: float | None, key: int, draw_on: torch.device) -> None:
    if std is None:
        assert constant is not None
        parameter.fill_(constant)
        return
    generator = torch.Generator(draw_on)
    generator.manual_seed(key)
    if draw_on.type == parameter.device.type and not is_dtensor(parameter):
        parameter.normal_(0.0, std, generator=generator)
        return
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=draw_on)
    whole.normal_(0.0, std, generator=generator)
    if is_dtensor(parameter):
        from torch.distributed.tensor import distribute_tensor

        # Every rank draws the same values and keeps its shard, so nothing is communicated.
        whole = whole.to(parameter.device)
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)
