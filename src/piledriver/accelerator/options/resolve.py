"""Resolve the constructor's arguments: one value for each setting, or an error that names the contradiction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from piledriver.accelerator.errors import OptionError, PrecisionError
from piledriver.accelerator.options.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from piledriver.engine.options import EngineOptions
from piledriver.runtime import environment


@dataclass
class Handlers:
    """`kwargs_handlers` by kind."""

    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    process_group: InitProcessGroupKwargs | None = None
    profile: ProfileKwargs | None = None
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)

    @classmethod
    def sorted_out(cls, given: Sequence[Any] | None) -> Handlers:
        """Sort handlers by kind; at most one of each."""
        handlers = cls()
        slots: dict[type, str] = {
            DistributedDataParallelKwargs: "ddp",
            GradScalerKwargs: "scaler",
            InitProcessGroupKwargs: "process_group",
            ProfileKwargs: "profile",
            AutocastKwargs: "autocast",
        }
        seen: set[str] = set()
        for one in given or ():
            slot = next((name for kind, name in slots.items() if isinstance(one, kind)), None)
            if slot is None:
                if isinstance(one, KwargsHandler):
                    raise OptionError(f"{type(one).__name__} is not supported", fix="leave it out")
                raise OptionError(f"unsupported kwargs handler passed: {one!r}", fix="pass KwargsHandler objects")
            if slot in seen:
                raise OptionError(f"you can only pass one {type(one).__name__} in kwargs_handlers", fix="merge them")
            seen.add(slot)
            setattr(handlers, slot, one)
        return handlers


def resolve_accumulation(plugin: GradientAccumulationPlugin | None, steps: int) -> GradientAccumulationPlugin:
    """Return the plugin, or one with the number of steps given or set by the launcher."""
    if plugin is not None:
        if steps != 1:
            raise OptionError(
                "you can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`",
                fix="put num_steps into the plugin",
            )
        return plugin
    found = environment.lookup(environment.ACCUMULATION_STEPS)
    try:
        told = int(found[0]) if found is not None else steps
    except ValueError:
        assert found is not None
        raise OptionError(f"{found[1]} is {found[0]!r}", fix="set it to a whole number") from None
    return GradientAccumulationPlugin(num_steps=steps if steps != 1 else told)


def resolve_project(config: ProjectConfiguration | None, project_dir: str | None) -> ProjectConfiguration:
    """Return the project configuration; `project_dir` fills in a missing folder."""
    config = config if config is not None else ProjectConfiguration(project_dir=project_dir)
    if project_dir is not None and config.project_dir is None:
        config.set_directories(str(project_dir))
    return config


def resolve_precision(wanted: str | PrecisionType | None) -> str:
    """Return the argument, else the environment's value, else "no".

    >>> resolve_precision("BF16")
    'bf16'
    """
    if wanted is None:
        found = environment.lookup(environment.MIXED_PRECISION)
        wanted = found[0] if found is not None else "no"
    name = str(getattr(wanted, "value", wanted)).lower()
    if name not in PrecisionType:
        raise PrecisionError(
            f"unknown mixed_precision mode: {name!r}", fix=f"choose from {', '.join(PrecisionType.list())}"
        )
    return name


def engine_options(handlers: Handlers, dynamo: TorchDynamoPlugin) -> EngineOptions:
    """Return what the handlers and the compiler plugin say, in the engine's terms."""
    return EngineOptions(
        ddp=(handlers.ddp or DistributedDataParallelKwargs()).to_engine(),
        autocast=handlers.autocast.to_dict(),
        compile=dynamo.to_kwargs() if dynamo.compiles else {},
    )


def reject_foreign_plugins(**plugins: Any) -> None:
    """Reject plugins of engines that ours does not have, instead of ignoring them."""
    for name, value in plugins.items():
        if value is not None:
            raise OptionError(
                f"{name} is not supported",
                fix="use layout=Layout(zero=..., tp=..., pp=..., offload=...), which covers ZeRO 1-3 and offload",
            )
