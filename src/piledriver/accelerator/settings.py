"""The constructor's arguments made consistent: one value for each question, or an error that says what contradicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from piledriver.accelerator.errors import OptionError
from piledriver.accelerator.options import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from piledriver.engine.layout import Layout, Precision
from piledriver.runtime import environment


@dataclass
class Handlers:
    """`kwargs_handlers`, each in its place."""

    replicas: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    process_group: InitProcessGroupKwargs | None = None
    profile: ProfileKwargs | None = None
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)

    @classmethod
    def sorted_out(cls, given: Sequence[Any] | None) -> Handlers:
        """One of each kind at most."""
        handlers = cls()
        slots: dict[type, str] = {
            DistributedDataParallelKwargs: "replicas",
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
                    raise OptionError(
                        f"{type(one).__name__} configures something that is not there yet", fix="leave it out"
                    )
                raise OptionError(f"unsupported kwargs handler passed: {one!r}", fix="pass KwargsHandler objects")
            if slot in seen:
                raise OptionError(f"you can only pass one {type(one).__name__} in kwargs_handlers", fix="merge them")
            seen.add(slot)
            setattr(handlers, slot, one)
        return handlers


def resolve_accumulation(plugin: GradientAccumulationPlugin | None, steps: int) -> GradientAccumulationPlugin:
    """The plugin, or one with the number of steps given or set by the launcher."""
    if plugin is not None:
        if steps != 1:
            raise OptionError(
                "you can only pass one of `gradient_accumulation_steps` and `gradient_accumulation_plugin`",
                fix="put num_steps into the plugin",
            )
        return plugin
    found = environment.read(environment.ACCUMULATION_STEPS)
    try:
        told = int(found[0]) if found is not None else steps
    except ValueError:
        assert found is not None
        raise OptionError(f"{found[1]} is {found[0]!r}", fix="set it to a whole number") from None
    return GradientAccumulationPlugin(num_steps=steps if steps != 1 else told)


def resolve_project(config: ProjectConfiguration | None, project_dir: str | None) -> ProjectConfiguration:
    """The project's folders; the argument fills in what the configuration leaves open."""
    config = config if config is not None else ProjectConfiguration(project_dir=project_dir)
    if project_dir is not None and config.project_dir is None:
        config.set_directories(str(project_dir))
    return config


def agreed_layout(layout: Layout | None, mixed_precision: str) -> Layout | None:
    """The layout with the precision that both arguments agree on.

    >>> agreed_layout(Layout(zero=3), "bf16")
    Layout(zero=3, precision='bf16')
    """
    if layout is None and mixed_precision == "fp8":
        return Layout(precision="fp8")
    if layout is None or mixed_precision == "no" or layout.precision.startswith(mixed_precision):
        return layout
    if layout.precision != "fp32":
        raise OptionError(
            f"mixed_precision is {mixed_precision!r}, the layout's precision is {layout.precision!r}",
            fix="give one of them",
        )
    return replace(layout, precision=cast(Precision, mixed_precision))


def say_what_is_missing(**plugins: Any) -> None:
    """Refuse plugins of engines that ours does not have, instead of ignoring them."""
    for name, value in plugins.items():
        if value is not None:
            raise OptionError(
                f"{name} asks for a foreign engine, which comes in a later issue",
                fix="say the same with layout=Layout(zero=..., tp=..., pp=...)",
            )
