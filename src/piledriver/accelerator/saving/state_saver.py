"""Save and load everything prepared, with automatic names, hooks and the user's own objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from piledriver.accelerator.errors import OptionError
from piledriver.accelerator.options.handlers import ProjectConfiguration
from piledriver.accelerator.state.prepared import Prepared
from piledriver.core.config import to_mapping
from piledriver.runtime.collectives.barrier import barrier
from piledriver.runtime.collectives.operations import broadcast_object
from piledriver.runtime.world import World

if TYPE_CHECKING:
    from piledriver.checkpoint import Checkpointer, Contents, LoadReport

SaveHook = Callable[[list[Any], list[Any], str], None]
LoadHook = Callable[[list[Any], str], None]


class StateSaver:
    """Implements `save_state` and `load_state`."""

    def __init__(self) -> None:
        self.custom: list[Any] = []
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._checkpointer: Checkpointer | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The side group and its threads belong to this process.
        return {**self.__dict__, "_checkpointer": None}

    @property
    def checkpointer(self) -> Checkpointer:
        """Return the checkpointer, created on first use at the same point on every rank."""
        if self._checkpointer is None:
            from piledriver.checkpoint import Checkpointer

            self._checkpointer = Checkpointer()
        return self._checkpointer

    def register(self, *things: Any) -> None:
        """Include these in checkpoints; they need `state_dict` and `load_state_dict`."""
        wrong = [
            f"Item at index {index}, {thing!r}"
            for index, thing in enumerate(things)
            if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict")
        ]
        if wrong:
            raise OptionError(
                "objects to checkpoint must have `state_dict` and `load_state_dict`: " + "; ".join(wrong),
                fix="give them both",
            )
        self.custom.extend(things)

    def add_save_hook(self, hook: SaveHook) -> RemovableHandle:
        """Register a hook called before a save with models, state dicts and folder; it may remove state dicts."""
        return _added(self.save_hooks, hook)

    def add_load_hook(self, hook: LoadHook) -> RemovableHandle:
        """Register a hook called before a load with models and folder; it may remove models from the list."""
        return _added(self.load_hooks, hook)

    def save(
        self,
        prepared: Prepared,
        project: ProjectConfiguration,
        folder: str | None,
        *,
        asynchronous: bool = False,
        alone: bool = False,
    ) -> str:
        """Save to a folder, or to the project's next one if names are automatic.

        All ranks call this, unless `alone`: then rank 0 saves without waiting for any other, and a rank that calls it
        too adds its own random generators.
        """
        from piledriver.checkpoint import folder_for, is_complete
        from piledriver.checkpoint.rank_states import write_rank_state

        total_limit = None
        if project.automatic_checkpoint_naming:
            root = Path(project.project_dir or ".") / "checkpoints"
            target = folder_for(root, project.iteration)
            total_limit = project.total_limit
        elif folder is None:
            raise OptionError("save_state needs a folder", fix="give one, or set automatic_checkpoint_naming=True")
        else:
            target = Path(folder)
        if alone:
            exists = prepared.world.is_main and is_complete(target)
        else:
            target, exists = self._agreed(prepared.world, target)
        if exists and project.automatic_checkpoint_naming:
            raise OptionError(
                f"checkpoint {project.iteration} exists already at {target}",
                fix="set ProjectConfiguration(iteration=...) to the next number when you resume",
            )
        models = list(prepared.models)
        if self.save_hooks:
            models = self._after_hooks(prepared.world, project, models, target, alone=alone)
        contents = self._contents(prepared, models)
        extra = {
            "accumulation_step": prepared.gradient_state.step,
            "accumulation_window": prepared.gradient_state.num_steps,
            "iteration": project.iteration,
        }
        if alone and not prepared.world.is_main:
            write_rank_state(target, prepared.world.rank, contents, extra)
        else:
            self.checkpointer.save(
                target,
                contents,
                layout=to_mapping(prepared.mesh.layout),
                extra=extra,
                asynchronous=asynchronous,
                total_limit=total_limit,
                alone=alone,
            )
        project.iteration += 1
        return str(target)

    def load(
        self, prepared: Prepared, project: ProjectConfiguration, folder: str | None, *, strict: bool = True
    ) -> LoadReport:
        """Load from a folder, or from the latest complete checkpoint of the project."""
        from piledriver.checkpoint import latest

        if folder is None:
            if not project.automatic_checkpoint_naming:
                raise OptionError("load_state needs a folder", fix="give one, or set automatic_checkpoint_naming=True")
            root = Path(project.project_dir or ".") / "checkpoints"
            wanted = latest(root) or root / "none"
        else:
            wanted = Path(folder)
        source, exists = self._agreed(prepared.world, wanted)
        if not exists and folder is None:
            raise OptionError(f"there is no complete checkpoint in {source.parent}", fix="give the folder of one")
        if not exists:
            raise OptionError(f"tried to find {source} but the folder does not exist", fix="check the path")
        models = list(prepared.models)
        for hook in self.load_hooks.values():
            hook(models, str(source))
        report = self.checkpointer.load(source, self._contents(prepared, models), strict=strict)
        state = prepared.gradient_state
        # Accelerate's folders keep it as their step.
        step = int(report.extra.get("accumulation_step", report.step or 0))
        window = int(report.extra.get("accumulation_window", state.num_steps))
        # A run that accumulates another number of batches starts with a new window, after as many whole ones.
        state.step = step if window == state.num_steps else step // window * state.num_steps
        return report

    def close(self) -> None:
        """Finish a pending save."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _agreed(self, world: World, folder: Path) -> tuple[Path, bool]:
        """Return rank 0's folder and whether it exists there: names made from the time of day differ between ranks."""
        path, exists = broadcast_object(world, (str(folder), folder.exists()))
        return Path(path), exists

    def _after_hooks(
        self, world: World, project: ProjectConfiguration, models: list[Any], target: Path, *, alone: bool
    ) -> list[Any]:
        """Return the models whose state dicts the hooks left in the list: a hook that saves one itself removes it."""
        if world.is_main or project.save_on_each_node:
            target.mkdir(parents=True, exist_ok=True)
        if not alone:
            barrier(world, name="save_state")
        weights = [model.state_dict() for model in models]
        passed, left = list(models), list(weights)
        for hook in self.save_hooks.values():
            hook(passed, left, str(target))
        kept = [any(one is other for other in left) for one in weights]
        if not alone:
            # Hooks often remove them on the main process only, which is the one that writes in Accelerate.
            kept = broadcast_object(world, kept)
        return [model for model, stays in zip(models, kept, strict=True) if stays]

    def _contents(self, prepared: Prepared, models: list[Any]) -> Contents:
        from piledriver.checkpoint import Contents

        return Contents(
            models=models,
            named_by=prepared.models,
            optimizers=prepared.optimizers,
            schedulers=prepared.schedulers,
            loaders=prepared.loaders,
            custom=self.custom,
            scaler=prepared.scaler,
        )


def _added(table: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(table)
    table[handle.id] = hook
    return handle
