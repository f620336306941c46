"""Stages of models whose order of modules is unknown: torch traces an example and splits the graph at the blocks.

Traced stages keep parameter names, and their modules replace the model's own, so that later steps of `apply` act on
them. They run recorded operators: ZeRO, recomputation and precision work; tensor parallelism and fp8 do not.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

from torch import nn

from piledriver.engine.blocks import blocks_of
from piledriver.engine.errors import LayoutError
from piledriver.engine.pipeline_parallel.costs import Cost, cost_of

EXAMPLE = "example_input_array"
"""Where a model keeps example inputs (Lightning's name): a tensor or a tuple of tensors, as large as a micro-batch."""


def example_of(model: nn.Module) -> tuple[Any, ...] | None:
    """Return the example inputs of a model, None without any."""
    found = getattr(model, EXAMPLE, None)
    return found if found is None or isinstance(found, tuple) else (found,)


def traced_units(model: nn.Module, length: int) -> list[tuple[tuple[str, ...], Cost]]:
    """Return the blocks with their costs; the first and last include what comes before and after."""
    blocks = blocks_of(model)
    if len(blocks) < 2:
        raise LayoutError(
            f"{type(model).__name__} has no list of blocks to split",
            fix="make it an nn.Sequential, or use pp=1",
        )
    children = list(model.named_children())
    home = next(iter(blocks)).split(".")[0]
    place = [name for name, _ in children].index(home)
    before, behind = (
        sum((cost_of(module, length) for _, module in part), Cost(0.0, 0))
        for part in (children[:place], children[place + 1 :])
    )
    units: list[tuple[tuple[str, ...], Cost]] = [((name,), cost_of(block, length)) for name, block in blocks.items()]
    units[0] = (units[0][0], units[0][1] + before)
    units[-1] = (units[-1][0], units[-1][1] + behind)
    return units


def trace_stages(model: nn.Module, starts: list[str]) -> list[nn.Module]:
    """Return the stages of a model; each but the first begins with the block of that name."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    example = example_of(model)
    assert example is not None
    try:
        with warnings.catch_warnings():
            # torch.export warns about parts of torch itself.
            warnings.simplefilter("ignore")
            pipe = pipeline(model, example, split_spec=dict.fromkeys(starts, SplitPoint.BEGINNING))
    except Exception as error:
        # torch wraps the error.
        cause = error.__cause__ or error
        reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise LayoutError(
            f"{type(model).__name__} cannot be traced: {reason}", fix="make it an nn.Sequential, or use pp=1"
        ) from error
    _check_chain(pipe.split_gm.graph)
    stages = [pipe.get_stage_module(number) for number in range(len(starts) + 1)]
    _check_shared(stages)
    return stages


def adopt(model: nn.Module, stages: list[nn.Module], blocks: list[str]) -> None:
    """Replace the model's modules by those of this rank's stages; class and names stay."""
    homes = {name.rsplit(".", depth)[0] for name in blocks for depth in range(1, name.count(".") + 1)}
    _merge(model, stages, "", homes)


def _merge(into: nn.Module, parts: list[nn.Module], path: str, homes: set[str]) -> None:
    """Merge the modules of several stages; containers of blocks are rebuilt."""
    holding = [part for part in parts if part._parameters or part._buffers]
    if len(holding) > 1:
        raise LayoutError(
            f"several stages of a rank use parameters or buffers of {path or 'the model'} itself",
            fix="use schedule 1f1b or gpipe, or move them into modules of their own",
        )
    # The same dictionaries: a parameter replaced in the stage (sharding) is replaced in the model.
    into._parameters = holding[0]._parameters if holding else {}
    into._buffers = holding[0]._buffers if holding else {}
    into._modules = {}
    for name in dict.fromkeys(name for part in parts for name in part._modules):
        members = [member for part in parts if (member := part._modules.get(name)) is not None]
        below = f"{path}.{name}".lstrip(".")
        if below not in homes:
            into._modules[name] = members[0]
            continue
        numbered = all(key.isdigit() for member in members for key in member._modules)
        made = into._modules[name] = nn.ModuleList() if numbered else nn.Module()
        _merge(made, members, below, homes)


def _check_chain(graph: Any) -> None:
    """Raise `LayoutError` unless every stage takes exactly the outputs of the one before it, in order."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    for number, node in enumerate(calls[1:], start=1):
        sources = [_source(argument) for argument in node.args]
        wanted = (
            [(calls[number - 1], None)] if len(sources) == 1 else [(calls[number - 1], i) for i in range(len(sources))]
        )
        if sources not in (wanted, [(calls[number - 1], 0)]) or node.kwargs:
            raise LayoutError(
                f"stage {number} needs more than the outputs of stage {number - 1} (model inputs, or earlier stages)",
                fix="make the blocks a chain, or use pp=1",
            )


def _source(node: Any) -> tuple[Any, int | None]:
    if getattr(node, "target", None) is operator.getitem:
        return node.args[0], node.args[1]
    return node, None


def _check_shared(stages: list[nn.Module]) -> None:
    owner: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            first = owner.setdefault(id(parameter), number)
            if first != number:
                raise LayoutError(
                    f"stages {first} and {number} share the parameter {name}",
                    fix="untie it, or use models.Transformer or a Hugging Face decoder",
                )
