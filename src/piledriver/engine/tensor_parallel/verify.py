"""Compare a sharded model with the plain one on a small input, and name the first module that differs.

Modules are compared in the order in which they finish; a sharded output is compared with its shard of the plain one.
Then the gradients of all parameters are compared.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from piledriver.engine.errors import LayoutError
from piledriver.models.feed_forward.moe import Experts

_TOLERANCE = 1e-4
"""Relative to the largest value of a tensor; fp32 sums in another order differ by less."""


def check_same(plain: nn.Module, split: nn.Module, mesh: DeviceMesh) -> None:
    """Raise `LayoutError` on every tp rank if any finds a difference."""
    inputs = small_input(plain)
    wanted, found = _run(plain, inputs), _run(split, inputs)
    complaint = _first_difference(wanted, found, mesh) or _gradient_difference(plain, split)
    complaints: list[Any] = [None] * mesh.size()
    dist.all_gather_object(complaints, complaint, group=mesh.get_group())
    split.zero_grad(set_to_none=True)
    first = next((one for one in complaints if one is not None), None)
    if first is not None:
        raise LayoutError(
            f"sharded over tp {mesh.size()}, {first} differs from the plain model",
            fix="use zero 3 for this model, or tp with our Transformer",
        )


def small_input(model: nn.Module) -> dict[str, Tensor] | Tensor:
    """Return token ids if the model begins with an embedding, else floats for its first linear layer.

    Encoder-decoder models of `transformers` name their own inputs.
    """
    named: dict[str, Tensor] | None = getattr(model, "dummy_inputs", None)
    if named is not None and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {name: tensor.to(next(model.parameters()).device) for name, tensor in named.items()}
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return torch.randint(module.num_embeddings, (2, 8), generator=generator).to(device)
        if isinstance(module, nn.Linear):
            dtype = module.weight.dtype
            return torch.randn(2, 8, module.in_features, generator=generator).to(device, dtype)
    raise LayoutError(f"{type(model).__name__} has no embedding or linear layer to check", fix="use debug=False")


def _run(model: nn.Module, inputs: dict[str, Tensor] | Tensor) -> dict[str, Tensor]:
    """Run forward and backward; return each module's last output, in the order in which they finish."""
    outputs: dict[str, Tensor] = {}
    modes = {module: module.training for module in model.modules()}
    model.eval()

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            tensor = _first_tensor(out)
            if tensor is not None:
                outputs.pop(name, None)
                outputs[name] = tensor.detach()

        return hook

    # Outputs of experts are all-reduced only after them.
    watched = [(name, module) for name, module in model.named_modules() if not isinstance(module, Experts)]
    handles = [module.register_forward_hook(keep(name)) for name, module in watched]
    try:
        model.zero_grad(set_to_none=True)
        out = _first_tensor(model(**inputs) if isinstance(inputs, dict) else model(inputs))
        if out is not None and out.requires_grad:
            torch.autograd.backward(out.float().square().mean())
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    return outputs


def _first_tensor(out: Any) -> Tensor | None:
    if isinstance(out, Tensor):
        return out if out.is_floating_point() else None
    values = out.values() if isinstance(out, dict) else out if isinstance(out, tuple | list) else ()
    return next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)


def _first_difference(wanted: dict[str, Tensor], found: dict[str, Tensor], mesh: DeviceMesh) -> str | None:
    for name, tensor in found.items():
        if name in wanted:
            expected = _as_part(wanted[name], tensor, mesh)
            if expected is None or not _close(expected, tensor):
                return f"the module {name or 'itself'!r}"
    return None


def _as_part(whole: Tensor, like: Tensor, mesh: DeviceMesh) -> Tensor | None:
    """Return the tensor, or this rank's chunk of it along the one dimension that is shorter in `like`."""
    if whole.dim() != like.dim():
        return None
    shorter = [dim for dim in range(whole.dim()) if whole.shape[dim] != like.shape[dim]]
    if not shorter:
        return whole
    if len(shorter) > 1:
        return None
    parts = whole.chunk(mesh.size(), shorter[0])
    part = parts[mesh.get_local_rank()] if mesh.get_local_rank() < len(parts) else None
    return part if part is not None and part.shape == like.shape else None


def _gradient_difference(plain: nn.Module, split: nn.Module) -> str | None:
    wanted = dict(plain.named_parameters())
    # Gradients that are zero but for rounding (a bias of keys) are compared relative to the largest one.
    largest = max((p.grad.abs().max().item() for p in wanted.values() if p.grad is not None), default=0.0)
    for name, parameter in split.named_parameters():
        expected, gradient = wanted[name].grad, parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if (expected is None) != (gradient is None):
            return f"the gradient of {name!r}"
        if expected is not None and gradient is not None and not _close(expected, gradient, 1e-2 * largest):
            return f"the gradient of {name!r}"
    return None


def _close(wanted: Tensor, found: Tensor, least: float = 1e-6) -> bool:
    scale = wanted.abs().max().item() if wanted.numel() else 0.0
    return torch.allclose(wanted.float(), found.float(), rtol=0.0, atol=_TOLERANCE * max(scale, least))
