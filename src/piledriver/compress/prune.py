"""`prune`: set weights of a model to zero (unstructured, or n of every m), or remove whole parts of it."""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from piledriver.compress.calibration import BlockWalk, Calibration, LayerStatistics, each_block
from piledriver.compress.forecast import CompressionPlan
from piledriver.compress.sparsegpt import importance, smallest, smallest_of_each, sparsegpt
from piledriver.compress.structured import SmallerShape, prune_shape
from piledriver.compress.structured.prune_shape import LayerScore
from piledriver.core.errors import UsageError
from piledriver.data import Cursor, TokenStream
from piledriver.models import Transformer
from piledriver.models.block import Block
from piledriver.models.codes import QuantisedCodes
from piledriver.models.feed_forward.moe import MoE
from piledriver.models.layers import Linear

PruneMethod = Literal["magnitude", "wanda", "sparsegpt"]
PRUNE_METHODS: tuple[PruneMethod, ...] = ("magnitude", "wanda", "sparsegpt")
CompareWithin = Literal["row", "layer"]


@torch.no_grad()
def prune(
    model: Transformer,
    sparsity: float | str | SmallerShape | CompressionPlan = 0.5,
    *,
    method: PruneMethod = "wanda",
    compare: CompareWithin = "row",
    data: Tensor | TokenStream | Calibration | None = None,
    samples: int = 128,
    cursor: Cursor | None = None,
    skip: Sequence[str] = (),
    damping: float = 0.01,
    correct: bool = True,
    layer_score: LayerScore = "influence",
    device: torch.device | str | None = None,
    batch_tokens: int = 8192,
    in_place: bool = False,
    show_progress: bool = False,
) -> Transformer:
    """Return the model with a share of the weights of its blocks' linear layers set to zero.

    `sparsity` is the share of each row (SparseGPT: of each 128 columns), or a pattern such as "2:4", which keeps 2 of
    every 4 consecutive weights. Magnitude removes small weights; Wanda small products of weight and input norm;
    SparseGPT also corrects the weights that stay. The last two calibrate on `data`, as `quantise` does, block by
    block. `compare="layer"` ranks all weights of a layer together (magnitude and Wanda), so that rows may lose
    different shares. `skip` holds patterns of layer names. The zeros are ordinary weights; training keeps them with
    `TrainConfig.keep_zeros`.

    With a `SmallerShape`, or a plan that has one, whole layers, channels, groups of heads, neurons or experts are
    removed, and the result is a plain smaller model; `correct` and `layer_score` are those of `structured.prune_shape`.

    >>> from piledriver.models import ModelConfig
    >>> model = Transformer(ModelConfig(vocab_size=32, dim=16, layers=1, heads=2))
    >>> sparse = prune(model, "2:4", data=torch.randint(32, (4, 8)))
    >>> float((sparse.blocks["0"].attention.qkv.weight == 0).float().mean())
    0.5
    """
    if isinstance(sparsity, CompressionPlan):
        if sparsity.shape is None:
            raise UsageError("the plan removes nothing", fix="plan with params:0.7, or quantise")
        sparsity = sparsity.shape
    _check(model, sparsity, method, compare, data, skip)
    calibration = None if data is None else Calibration.of(data, samples=samples, cursor=cursor)
    model = model if in_place else copy.deepcopy(model)
    place = torch.device(device) if device is not None else model.device
    if isinstance(sparsity, SmallerShape):
        assert calibration is not None
        return prune_shape(
            model,
            sparsity,
            calibration,
            layer_score=layer_score,
            correct=correct,
            damping=damping,
            device=place,
            batch_tokens=batch_tokens,
            show_progress=show_progress,
        )
    pattern, share = _parse(sparsity)
    walk = None
    if calibration is not None and method != "magnitude":
        walk = BlockWalk(model, calibration, device=place, batch_tokens=batch_tokens)
    skipped: dict[str, str] = {}
    zeros: dict[str, float] = {}
    for name, block in each_block(model, "prune", show_progress):
        home = next(block.parameters()).device
        layers = _layers_to_prune(name, block, skip, skipped)
        known = {} if walk is None else walk.statistics(name, block, layers)
        for key, layer in layers.items():
            layer.weight.copy_(_pruned(layer.weight, known.get(key), method, share, pattern, compare, damping))
            zeros[f"blocks.{name}.{key}"] = float((layer.weight == 0).float().mean())
        if walk is not None:
            walk.advance(name, block)
        block.to(home)
    if not zeros:
        raise UsageError(f"skip {list(skip)} leaves no layer to prune", fix="skip fewer layers")
    model.compression.append(
        {
            "act": "prune",
            "method": method,
            "sparsity": sparsity,
            "compare": compare,
            "calibration": None if walk is None or calibration is None else dict(calibration.origin),
            "zeros": zeros,
            "skipped": skipped,
        }
    )
    return model


def _check(
    model: Transformer,
    sparsity: float | str | SmallerShape,
    method: PruneMethod,
    compare: CompareWithin,
    data: Tensor | TokenStream | Calibration | None,
    skip: Sequence[str],
) -> None:
    """Raise `UsageError` for what cannot be done, before the model is copied or calibrated."""
    if isinstance(sparsity, SmallerShape):
        if data is None:
            raise UsageError("a smaller shape needs calibration text", fix="give data=tokens, or a TokenStream")
        if skip:
            raise UsageError("skip names layers, and a smaller shape changes all of them", fix="leave out skip")
        return
    if any(isinstance(module, QuantisedCodes) for module in model.modules()):
        raise UsageError("the model is quantised", fix="prune the dense model first, then quantise")
    pattern, _ = _parse(sparsity)
    if method not in PRUNE_METHODS:
        raise UsageError(f"no method {method!r}", fix=f"choose from {', '.join(PRUNE_METHODS)}")
    if data is None and method != "magnitude":
        raise UsageError(f"method {method!r} needs calibration text", fix="give data=tokens, or a TokenStream")
    if compare == "layer" and (pattern is not None or method == "sparsegpt"):
        raise UsageError(
            f"compare='layer' with {method} and sparsity {sparsity}", fix="use magnitude or wanda and a share"
        )
    names = [f"blocks.{name}" for name, module in model.blocks.named_modules() if isinstance(module, Linear)]
    for one in skip:
        if not fnmatch.filter(names, one):
            raise UsageError(f"skip pattern {one!r} matches no layer", fix=f"names are such as {names[0]}")


def _layers_to_prune(name: str, block: Block, skip: Sequence[str], skipped: dict[str, str]) -> dict[str, Linear]:
    """Return the layers of a block that are pruned; add the others to `skipped`, each with the reason."""
    if isinstance(block.mlp, MoE):
        skipped[f"blocks.{name}.mlp.experts"] = "experts are removed whole: give a SmallerShape"
    found = {}
    for key, module in block.named_modules():
        full = f"blocks.{name}.{key}"
        if type(module) is not Linear:
            continue
        if any(fnmatch.fnmatch(full, one) for one in skip):
            skipped[full] = "matches a skip pattern"
        elif key in ("mlp.router.score", "shared_gate"):
            skipped[full] = "small, and its choices must not change"
        else:
            found[key] = module
    return found


def _parse(sparsity: float | str) -> tuple[tuple[int, int] | None, float]:
    """Return the pattern (kept, width) or None, and the share of weights that is removed."""
    if not isinstance(sparsity, str):
        if not 0 < sparsity < 1:
            raise UsageError(f"sparsity is {sparsity}", fix="give a share between 0 and 1, or a pattern such as 2:4")
        return None, float(sparsity)
    found = re.fullmatch(r"(\d+):(\d+)", sparsity)
    kept, width = (int(found[1]), int(found[2])) if found else (0, 0)
    # Parts of 128 columns, which SparseGPT corrects at once, hold whole patterns.
    if not 0 < kept < width or 128 % width:
        raise UsageError(f"sparsity {sparsity!r} is not a pattern", fix="use 2:4, 4:8, or a share such as 0.5")
    return (kept, width), 1 - kept / width


def _pruned(
    weight: Tensor,
    statistics: LayerStatistics | None,
    method: PruneMethod,
    share: float,
    pattern: tuple[int, int] | None,
    compare: CompareWithin,
    damping: float,
) -> Tensor:
    if method == "sparsegpt":
        assert statistics is not None
        return sparsegpt(weight, statistics.hessian, share, pattern=pattern, damping=damping)
    scores = importance(weight, None if statistics is None else statistics.hessian)
    if pattern is not None:
        mask = smallest_of_each(scores, *pattern)
    elif compare == "layer":
        mask = smallest(scores.reshape(1, -1), share).view_as(scores)
    else:
        mask = smallest(scores, share)
    return weight.masked_fill(mask, 0.0)
