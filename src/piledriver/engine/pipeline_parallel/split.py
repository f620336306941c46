"""Split a model into pipeline stages, before anything is allocated.

A rank keeps the modules of its stages only. Works on the meta device, so that no rank holds another's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import nn

from piledriver.engine.errors import LayoutError
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import Mesh
from piledriver.engine.pipeline_parallel.balance import balanced
from piledriver.engine.pipeline_parallel.costs import weights
from piledriver.engine.pipeline_parallel.schedules import rank_of_stage, stages_of_rank
from piledriver.engine.pipeline_parallel.traced import adopt, trace_stages
from piledriver.engine.pipeline_parallel.units import PipelineUnits, drop_modules, shell, units_of
from piledriver.engine.shards.tied_parameters import record_tied_keys
from piledriver.models.layers import Linear

_NAME = "_pipeline_split"


@dataclass(frozen=True, eq=False)
class Split:
    """How a model was split, and what this rank holds of it."""

    chain: PipelineUnits
    names: list[tuple[str, ...]]
    """The modules of each stage."""
    stages: list[int]
    """The stages of this rank."""
    made: list[nn.Module]
    """The modules that run them, once built."""

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def keep_own_stages(model: nn.Module, mesh: Mesh, *, sequence_length: int | None = None) -> nn.Module:
    """Keep of a model what this rank's stages need, in place.

    The last stage gets a copy of a tied weight, which `Pipeline` keeps in sync.
    """
    layout = mesh.layout
    chain = units_of(model, sequence_length)
    names = assign_stages(chain, layout.stages, layout.stage_blocks)
    mine = stages_of_rank(layout, mesh.pp.get_local_rank())
    if chain.kind == "traced":
        return _split_traced(model, chain, names, mine, layout)
    kept = {name for stage in mine for name in names[stage]}
    record_tied_keys(model, {f"{b}.weight": f"{o}.weight" for b, o in chain.borrows.items() if _has(model, b)})
    if chain.borrows and layout.stages - 1 in mine:
        _make_room(model, chain)
    drop_modules(model, [name for stage in names for name in stage if name not in kept and _has(model, name)])
    model.__dict__[_NAME] = Split(chain, names, mine, [])
    return model


def _split_traced(
    model: nn.Module, chain: PipelineUnits, names: list[tuple[str, ...]], mine: list[int], layout: Layout
) -> nn.Module:
    if layout.tp > 1:
        raise LayoutError(
            f"tp {layout.tp} is not supported for the traced stages of a {type(model).__name__}", fix="use tp=1"
        )
    every = trace_stages(model, [stage[0] for stage in names[1:]])
    stages = [every[number] for number in mine]
    adopt(model, stages, [name for stage in names for name in stage])
    model.__dict__[_NAME] = Split(chain, names, mine, stages)
    return model


def assign_stages(chain: PipelineUnits, stages: int, blocks: tuple[int, ...] | None = None) -> list[tuple[str, ...]]:
    """Return the module names of each stage: `blocks` of them if given, else minimising the most expensive stage."""
    if len(chain.units) < stages:
        raise LayoutError(
            f"{stages} stages of a model with {len(chain.units)} units (blocks, and the output layer)",
            fix=f"use at most {len(chain.units)} stages: a smaller pp or stages_per_rank",
        )
    if blocks is None:
        parts = balanced(weights([unit.cost for unit in chain.units]), stages)
    else:
        parts = parts_by_count(blocks, len(chain.units), output=chain.has_output)
    return [tuple(name for unit in chain.units[part.start : part.stop] for name in unit.names) for part in parts]


def parts_by_count(blocks: tuple[int, ...], units: int, *, output: bool) -> list[range]:
    """Return the units of each stage by given counts of blocks; an output unit follows the last block.

    >>> parts_by_count((1, 3), 5, output=True)
    [range(0, 1), range(1, 5)]
    """
    there = units - output
    if sum(blocks) != there or (blocks[-1] == 0 and not output):
        even = [there // len(blocks)] * len(blocks)
        even[-1] += there - sum(even)
        raise LayoutError(
            f"stage_blocks {list(blocks)} names {sum(blocks)} blocks of a model with {there}", fix=f"use {even}"
        )
    edges = [0, *accumulate(blocks)]
    edges[-1] = units
    return [range(begin, end) for begin, end in pairwise(edges)]


def pipeline_split(model: nn.Module) -> Split | None:
    """Return how a model was split, None for an unsplit one."""
    found: Split | None = model.__dict__.get(_NAME)
    return found


def made_stages(model: nn.Module) -> list[nn.Module]:
    """Return the modules that run this rank's stages; for an unsplit model, itself."""
    known = pipeline_split(model)
    if known is None:
        return [model]
    if not known.made:
        for stage in known.stages:
            keep = set(known.names[stage])
            others = [n for s in known.stages for n in known.names[s] if n not in keep and _has(model, n)]
            known.made.append(known.chain.make_stage(shell(model, others)))
            # The record of the split belongs to the model, not to its stages.
            known.made[-1].__dict__.pop(_NAME, None)
        # Optimizer, checkpoints and norms see a tied weight on its owner only.
        drop_modules(model, [name for name in known.chain.borrows if _has(model, name)])
    return known.made


def stage_borders(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the modules of this rank that receive from another stage, and those that send to one.

    Call it before `made_stages`; empty for an unsplit model.
    """
    known = pipeline_split(model)
    if known is None:
        return [], []
    chains = [[name for name in known.names[stage] if _has(model, name)] for stage in known.stages]
    heads = [names[0] for stage, names in zip(known.stages, chains, strict=True) if stage > 0]
    tails = [names[-1] for stage, names in zip(known.stages, chains, strict=True) if stage < len(known.names) - 1]
    return heads, tails


def ends(layout: Layout) -> tuple[int, int]:
    """Return the pipeline ranks of the first and the last stage."""
    return rank_of_stage(layout, 0), rank_of_stage(layout, layout.stages - 1)


def _make_room(model: nn.Module, chain: PipelineUnits) -> None:
    for borrower, owner in chain.borrows.items():
        weight = cast(torch.Tensor, model.get_submodule(owner).weight)
        room = nn.Parameter(torch.empty_like(weight), requires_grad=weight.requires_grad)
        if not _has(model, borrower):
            parent, _, key = borrower.rpartition(".")
            made = Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            setattr(model.get_submodule(parent), key, made)
        # Keep the user's module with its class and hooks; replace only its weight.
        model.get_submodule(borrower).weight = room


def _has(model: nn.Module, name: str) -> bool:
    parent, _, key = name.rpartition(".")
    return model.get_submodule(parent)._modules.get(key) is not None
