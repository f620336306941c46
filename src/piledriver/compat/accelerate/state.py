"""`PartialState`, `AcceleratorState`, `GradientState`: Accelerate's shared states, each a view of one `World` value.

Our own state is a `World` value that is passed; these exist because Accelerate's users look the state up from anywhere.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from piledriver.accelerator.options.handlers import DistributedType, GradientAccumulationPlugin
from piledriver.accelerator.options.resolve import resolve_precision
from piledriver.accelerator.state.accumulation import GradientState as _GradientState
from piledriver.accelerator.state.process_info import ProcessInfo, distributed_type
from piledriver.runtime.connection import connect, disconnect
from piledriver.runtime.world import World, current_world, detect_world


def is_initialized() -> bool:
    """Return whether an `AcceleratorState` exists."""
    return AcceleratorState._shared_state != {}


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""
    return None


def _missing(owner: str, name: str, known: tuple[str, ...]) -> AttributeError:
    if name in known:
        return AttributeError(
            f"`{owner}` object has no attribute `{name}`. "
            f"This happens if `{owner}._reset_state()` was called and "
            "an `Accelerator` or `PartialState` was not reinitialized."
        )
    return AttributeError(f"'{owner}' object has no attribute '{name}'")


_PARTIAL_KNOWN = (
    "_cpu",
    "_world",
    "_mixed_precision",
    "_shared_state",
    "backend",
    "debug",
    "device",
    "distributed_type",
    "fork_launched",
    "local_process_index",
    "num_processes",
    "process_index",
    "use_distributed",
    "is_main_process",
    "is_local_main_process",
    "is_last_process",
    "world",
)


class _SettableType(ProcessInfo):
    """A distributed type that users may assign, to try the behaviour of another one."""

    @property
    def distributed_type(self) -> Any:
        """Return the kind of processes that train together."""
        return self.__dict__.get("_type") or distributed_type(self.world)

    @distributed_type.setter
    def distributed_type(self, value: Any) -> None:
        self.__dict__["_type"] = value

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickled in another process, it detects that process's own world.
        return type(self), ()


class PartialState(_SettableType):
    """The world of this process, shared by all instances."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attrs: ClassVar[list[str]] = list(_PARTIAL_KNOWN)

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            return
        world = current_world(device="cpu" if cpu else None, backend=kwargs.get("backend"))
        connect(world, timeout=kwargs.get("timeout"))
        self.__dict__.update(
            _world=world,
            _cpu=cpu or world.device.type == "cpu",
            backend=world.backend,
            debug=world.debug,
            device=world.device,
            fork_launched=False,
        )

    @property
    def world(self) -> World:  # type: ignore[override]
        """Return the `World`, with the `debug` flag of this state."""
        world: World = self._world
        return world if world.debug == self.debug else world.with_debug(self.debug)

    @property
    def initialized(self) -> bool:
        """Return whether an instance exists."""
        return self._shared_state != {}

    @property
    def default_device(self) -> torch.device:
        """Return the device that detection chooses."""
        return detect_world().device

    def set_device(self) -> None:
        """Do nothing: the device was set when the world was detected."""

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the process group."""
        disconnect()

    @staticmethod
    def _reset_state() -> None:
        PartialState._shared_state.clear()

    def __getattr__(self, name: str) -> Any:
        raise _missing("PartialState", name, _PARTIAL_KNOWN)

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{'  Backend: ' + self.backend if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


_ACCELERATOR_KNOWN = (
    *_PARTIAL_KNOWN,
    "deepspeed_plugin",
    "use_ipex",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "dynamo_plugin",
)


class RankOutlivesReset(ProcessInfo):
    """What can still be asked after `AcceleratorState._reset_state()`, as in Accelerate."""

    @property
    def is_main_process(self) -> bool:
        return PartialState().is_main_process

    @property
    def is_local_main_process(self) -> bool:
        return PartialState().is_local_main_process

    @property
    def is_last_process(self) -> bool:
        return PartialState().is_last_process

    @property
    def use_distributed(self) -> bool:
        return PartialState().use_distributed


class AcceleratorState(RankOutlivesReset, _SettableType):
    """The world and the precision of the run, shared by all instances."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attrs: ClassVar[list[str]] = list(_ACCELERATOR_KNOWN)

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        # Also if this state exists: the other may have been reset since.
        partial = PartialState(cpu, **kwargs)
        if self.initialized:
            self._check_initialized(mixed_precision, cpu)
            return
        self.__dict__.update(
            _cpu=cpu, _mixed_precision=resolve_precision(mixed_precision), dynamo_plugin=dynamo_plugin, fsdp_plugin=None
        )
        # The device must fit, also if the processes were connected before.
        if cpu and partial.device.type != "cpu":
            self._shared_state.clear()
            raise ValueError(
                "PartialState has already been initialized on another device: pass `cpu=True` to the first one"
            )

    def _check_initialized(self, mixed_precision: str | None = None, cpu: bool = False) -> None:
        problem = "AcceleratorState has already been initialized and cannot be changed, restart your runtime completely"
        if cpu and self.device.type != "cpu":
            raise ValueError(f"{problem} and pass `cpu=True` to `Accelerator()`.")
        if mixed_precision is not None and resolve_precision(mixed_precision) != self._mixed_precision:
            raise ValueError(f"{problem} and pass `mixed_precision='{mixed_precision}'` to `Accelerator()`.")

    @property
    def world(self) -> World:  # type: ignore[override]
        """Return the `World`."""
        if not self.initialized:
            raise AttributeError("world")
        return PartialState().world

    @property
    def initialized(self) -> bool:
        """Return whether an instance exists."""
        return self._shared_state != {}

    @property
    def mixed_precision(self) -> str:
        """Return the precision of the run."""
        precision: str = self._mixed_precision
        return precision

    @property
    def backend(self) -> str | None:
        """Return the backend of the process group."""
        return self.world.backend

    @property
    def debug(self) -> bool:
        """Return whether ranks compare each collective before it runs."""
        return self.world.debug

    def set_fsdp_plugin(self, plugin: Any) -> None:
        """Record the FSDP plugin; the distributed type is then FSDP, as in Accelerate."""
        self.__dict__["fsdp_plugin"] = plugin
        if self.use_distributed:
            self.distributed_type = DistributedType.FSDP

    @property
    def deepspeed_plugin(self) -> Any:
        """Return None: `Layout(zero=...)` replaces DeepSpeed's stages."""
        return None

    @property
    def is_fsdp2(self) -> bool:
        """Return whether an FSDP plugin of version 2 is set."""
        return int(getattr(self.__dict__.get("fsdp_plugin"), "fsdp_version", 1)) == 2

    @property
    def fork_launched(self) -> bool:
        """Return False: XLA only."""
        return False

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the process group."""
        disconnect()

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __getattr__(self, name: str) -> Any:
        # The error names the attribute that was read, not its storage.
        raise _missing("AcceleratorState", name, (*_ACCELERATOR_KNOWN, "mixed_precision"))

    def __repr__(self) -> str:
        return f"{PartialState()!r}Mixed precision type: {self.mixed_precision}\n"


class GradientState(_GradientState):
    """The place in the accumulation window, shared by all instances."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            super().__init__(gradient_accumulation_plugin)
        elif gradient_accumulation_plugin is not None:
            self.configure(gradient_accumulation_plugin)

    @property
    def initialized(self) -> bool:
        """Return whether an instance exists."""
        return self._shared_state != {}

    @staticmethod
    def _reset_state() -> None:
        GradientState._shared_state.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Unpickled, it joins the shared state of this process.
        self.__dict__ = self._shared_state
        if not self.initialized:
            self._shared_state.update(state)
