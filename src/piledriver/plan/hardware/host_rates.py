"""Measure the host: its seconds for a launch of an eager block, and an optimizer that is offloaded to it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from piledriver.engine.apply import apply, apply_optimizer
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.optimizer.clip import clip_grad_norm
from piledriver.engine.optimizer.parameter_map import ParameterMap
from piledriver.models import Transformer
from piledriver.models.config import ModelConfig
from piledriver.optim import OptimizerConfig, build_optimizer

# Blocks of two models whose difference is the host's time of small eager blocks, and the launches of one of them.
_DEPTHS, _SMALL_BLOCK = (2, 12), 303.0
# A model of 134M parameters, whose states are larger than any cache, and one to try the measurement on a CPU.
_OFFLOADED = ModelConfig(vocab_size=512, dim=2048, layers=2, heads=16, mlp_dim=8192, max_positions=16)
_OFFLOADED_SMALL = ModelConfig(vocab_size=512, dim=256, layers=2, heads=2, mlp_dim=1024, max_positions=16)


def launch_seconds(device: torch.device, *, repeats: int = 12) -> float:
    """Return the host's seconds for one launch, as an eager block makes them: its seconds over their number.

    A loop of one small kernel would leave out the Python between operators, which machines differ in.
    """
    seconds = [_eager_seconds(device, layers, repeats) for layers in _DEPTHS]
    return max(1e-6, (seconds[1] - seconds[0]) / (_DEPTHS[1] - _DEPTHS[0]) / _SMALL_BLOCK)


def _eager_seconds(device: torch.device, layers: int, repeats: int) -> float:
    """Return the fastest seconds of a forward and a backward on so few tokens that the host is slower."""
    config = ModelConfig(vocab_size=512, dim=128, layers=layers, heads=2, mlp_dim=256, max_positions=16)
    model = Transformer(config, seed=0).to(device)
    model.compute_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens = torch.zeros(1, 16, dtype=torch.int64, device=device)
    return _fastest(lambda: model(tokens, targets=tokens).total.backward(), device, repeats)


def offloaded_step_rate(device: torch.device, *, steps: int = 4) -> float:
    """Return parameters per second of an offloaded AdamW, as the engine runs it.

    That is: gradients are sent to the host and converted, their norm is taken, they are clipped, AdamW steps on the
    masters, new weights are sent back. AdamW alone is a fraction of it.
    """
    gpu = device.type == "cuda"
    layout = Layout(offload="optimizer", precision="bf16" if gpu else "fp32", compile=False)
    mesh = make_mesh(layout, device.type)
    with torch.device("meta"):
        made = Transformer(_OFFLOADED if gpu else _OFFLOADED_SMALL)
    model = apply(made, mesh, device=device)
    # Nothing may be learned: squares of vanishing gradients are denormal numbers, with which a CPU is slow.
    optimizer = build_optimizer(model, OptimizerConfig(kind="adamw", lr=1e-12))
    apply_optimizer(optimizer, mesh, ParameterMap())
    tokens = torch.zeros(1, 16, dtype=torch.int64, device=device)

    def step() -> None:
        model(tokens, targets=tokens).total.backward()
        clip_grad_norm(model.parameters(), 1.0, 2.0, mesh)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return sum(parameter.numel() for parameter in model.parameters()) / _fastest(step, device, steps)


def _fastest(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the fewest seconds that a call took, the device's work included."""
    taken = []
    for _ in range(repeats):
        wait(device)
        begun = time.perf_counter()
        run()
        wait(device)
        taken.append(time.perf_counter() - begun)
    return min(taken)


def wait(device: torch.device) -> None:
    """Wait for the device; a CPU is never ahead."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
