"""Block-wise reconstruction: train each block of a compressed model to give the dense model's outputs.

Blocks are treated in order, with the inputs that the reconstructed ones before them give, so that each also corrects
what came before it. No logits, no optimizer state of the whole model: one block is on the device at a time.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from piledriver.compress.calibration import BlockWalk, Calibration
from piledriver.compress.distil.objective import matching_layers
from piledriver.core.errors import UsageError
from piledriver.data import Cursor, TokenStream
from piledriver.models import Transformer
from piledriver.models.codes import QuantisedCodes

_ATTEMPTS = 3
"""Rates that are tried for a block."""
_WARMUP = 0.1
_RATE = 7e-3
"""Default rate, times the square root of the width."""
# Batches of a pass at least, and their tokens at most.
_BATCHES, _LARGEST_BATCH = 16, 8192


def reconstruct(
    model: Transformer,
    teacher: Transformer,
    data: Tensor | TokenStream | Calibration,
    *,
    samples: int = 128,
    cursor: Cursor | None = None,
    epochs: int = 8,
    lr: float | None = None,
    keep_zeros: bool = True,
    device: torch.device | str | None = None,
    batch_tokens: int | None = None,
    in_place: bool = False,
) -> Transformer:
    """Return the model with every block fitted to the teacher's outputs on calibration text.

    The parameters of a block are trained by Adam for `epochs` passes over the samples, at a rate that rises to `lr`
    (default: one that falls with the square root of the width, 2.5e-4 at 768) and falls to zero. Batches of
    `batch_tokens` (default: a sixteenth of the samples, at most 8,192) come in a fixed order, so the same data give the
    same bits on one device. A block that this rate makes worse is fitted again at a quarter of it, and so are the
    blocks after it. Zeros of weights stay with `keep_zeros`. A block answers for all teacher blocks up to the next one
    that was kept, and for the channels that were kept.

    >>> from piledriver.compress import prune
    >>> from piledriver.models import ModelConfig
    >>> dense = Transformer(ModelConfig(vocab_size=32, dim=16, layers=1, heads=2))
    >>> tokens = torch.randint(32, (4, 8))
    >>> better = reconstruct(prune(dense, 0.5, data=tokens), dense, tokens, epochs=2)
    >>> record = better.compression[-1]["relative_error"]["blocks.0"]
    >>> record["after"] < record["before"]
    True
    """
    if any(isinstance(module, QuantisedCodes) for module in model.modules()):
        raise UsageError("quantised layers cannot be trained", fix="reconstruct before quantise")
    lr = float(f"{_RATE / math.sqrt(model.config.dim):.1e}") if lr is None else lr
    if epochs < 1 or lr <= 0:
        raise UsageError(f"epochs is {epochs} and lr {lr}", fix="give positive numbers")
    calibration = Calibration.of(data, samples=samples, cursor=cursor)
    batch_tokens = batch_tokens or max(1, min(_LARGEST_BATCH, calibration.tokens.numel() // _BATCHES))
    layers, channels = matching_layers(model, teacher)
    model = model if in_place else copy.deepcopy(model)
    place = torch.device(device) if device is not None else model.device
    theirs = BlockWalk(teacher, calibration, device=place, batch_tokens=batch_tokens)
    ours = BlockWalk(model, calibration, device=place, batch_tokens=batch_tokens)
    names = list(teacher.blocks)
    errors: dict[str, dict[str, float]] = {}
    reached = 0
    for number, (name, block) in enumerate(model.blocks.items()):
        end = layers[number + 1] if number + 1 < len(layers) else len(names)
        for layer in names[reached:end]:
            home = next(teacher.blocks[layer].parameters()).device
            theirs.advance(layer, teacher.blocks[layer])
            teacher.blocks[layer].to(home)
        reached = max(reached, end)
        goals = theirs.states if channels is None else [state[..., channels] for state in theirs.states]
        home = next(block.parameters()).device
        for _ in range(_ATTEMPTS):
            found = _fit(ours, name, block, goals, epochs=epochs, lr=lr, keep_zeros=keep_zeros)
            errors[f"blocks.{name}"] = found
            if found["after"] < found["before"] or not found["before"]:
                break
            lr /= 4
        ours.advance(name, block)
        block.to(home)
    model.compression.append(
        {
            "act": "reconstruct",
            "calibration": dict(calibration.origin),
            "epochs": epochs,
            "lr": lr,
            "relative_error": errors,
            "skipped": {},
        }
    )
    return model


def _fit(
    walk: BlockWalk, name: str, block: nn.Module, goals: list[Tensor], *, epochs: int, lr: float, keep_zeros: bool
) -> dict[str, float]:
    """Train a block on the walk's states; return its relative squared error before and after."""
    before, size = _error(walk, name, block, goals)
    if not before:  # an unchanged block
        return {"before": before, "after": before}
    known = {key: (parameter.dtype, parameter.requires_grad) for key, parameter in block.named_parameters()}
    start = {key: parameter.detach().clone() for key, parameter in block.named_parameters()}
    trained = [parameter for parameter in block.parameters() if parameter.is_floating_point()]
    for parameter in trained:
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    zeros = [(parameter, parameter == 0) for parameter in trained if keep_zeros and parameter.dim() > 1]
    optimizer = torch.optim.Adam(trained, lr=lr, betas=(0.9, 0.95), fused=walk.device.type == "cuda")
    scale = size / sum(goal.numel() for goal in goals)
    steps, step = epochs * len(goals), 0
    warmup = max(1, round(_WARMUP * steps))
    for _ in range(epochs):
        for index, goal in enumerate(goals):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))
            with torch.enable_grad():
                out = walk.output(name, block, index)
                wide = goal.to(out.device, non_blocking=True).float()
                loss = (out.float() - wide).square().mean() / max(scale, 1e-12)
            loss.backward()  # type: ignore[no-untyped-call]
            for parameter, mask in zeros:
                if parameter.grad is not None:
                    parameter.grad.masked_fill_(mask, 0.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
    for key, parameter in block.named_parameters():
        dtype, requires_grad = known[key]
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(requires_grad)
    after, _ = _error(walk, name, block, goals)
    if not after < before:
        # A rate that is too high for this block: the compressed weights were better.
        for key, parameter in block.named_parameters():
            parameter.data.copy_(start[key])
    return {"before": before, "after": min(before, after) if math.isfinite(after) else before}


@torch.no_grad()
def _error(walk: BlockWalk, name: str, block: nn.Module, goals: list[Tensor]) -> tuple[float, float]:
    """Return the relative squared error of a block's outputs, and the sum of squares of the goals."""
    sums = torch.zeros(2, dtype=torch.float64, device=walk.device)
    for (_, out), goal in zip(walk.outputs(name, block), goals, strict=True):
        wide = goal.to(out.device, non_blocking=True).float()
        sums += torch.stack([(out.float() - wide).double().square().sum(), wide.double().square().sum()])
    difference, size = sums.tolist()
    return difference / max(size, 1e-30), size
