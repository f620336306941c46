"""Launch config: from defaults, a file and flags, in that order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from piledriver.core import config, storage
from piledriver.core.config.yaml_tree import ConfigTree, parse_yaml
from piledriver.core.errors import UsageError
from piledriver.runtime import environment
from piledriver.runtime.hardware import Hardware
from piledriver.runtime.launch.accelerate_flags import flags_from_config, is_accelerate_config, launch_fields


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Settings of `piledriver launch`."""

    nproc: int | Literal["auto"] = "auto"
    """processes per node; auto: one per accelerator, or one without accelerators"""
    nnodes: str = "1"
    """nodes, or MIN:MAX for an elastic job"""
    node_rank: int | None = None
    """rank of this node; without it nodes are numbered in the order of arrival"""
    rdzv_endpoint: str | None = None
    """HOST:PORT of the rendezvous, the same on all nodes; needed for more than one node"""
    rdzv_id: str = "piledriver"
    """name of the job, so that two jobs at one endpoint stay apart"""
    rdzv_timeout_seconds: float = 300.0
    """how long nodes wait for each other"""
    max_restarts: int = 0
    """restarts of all processes after one of them failed"""
    cpu: bool = False
    """use the CPU even if there is an accelerator"""
    bind_numa: bool = False
    """keep each process on the cores near its device"""
    log_dir: str | None = None
    """folder for one log file per process"""
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = None
    """default for Accelerator(mixed_precision=...)"""
    gradient_accumulation_steps: int | None = None
    """default for Accelerator(gradient_accumulation_steps=...)"""
    debug_collectives: bool = False
    """verify before every collective that all ranks call the same one"""
    alias_accelerate: bool = False
    """`import accelerate` gives piledriver's compatible modules"""
    env: dict[str, str] = field(default_factory=dict)
    """environment variables of the processes"""

    def __post_init__(self) -> None:
        if self.nproc != "auto" and self.nproc < 1:
            raise UsageError(f"--nproc is {self.nproc}", fix="start at least one process per node")
        low, high = self.node_range()
        if not 1 <= low <= high:
            raise UsageError(f"--nnodes is {self.nnodes!r}", fix="give a number of nodes, or MIN:MAX")
        if high > 1 and self.rdzv_endpoint is None:
            raise UsageError(
                f"--nnodes is {self.nnodes} without --rdzv-endpoint",
                fix="give --rdzv-endpoint HOST:PORT of the first node",
            )
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts is {self.max_restarts}", fix="give 0 or more")
        if self.gradient_accumulation_steps is not None and self.gradient_accumulation_steps < 1:
            raise UsageError(
                f"--gradient-accumulation-steps is {self.gradient_accumulation_steps}", fix="give 1 or more"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < high:
            raise UsageError(f"--node-rank is {self.node_rank} of {high} nodes", fix="count nodes from 0")

    def node_range(self) -> tuple[int, int]:
        """Return the minimum and the maximum number of nodes.

        >>> LaunchConfig(nnodes="2:4", rdzv_endpoint="host:29400").node_range()
        (2, 4)
        """
        low, _, high = self.nnodes.partition(":")
        try:
            return int(low), int(high or low)
        except ValueError:
            raise UsageError(f"--nnodes is {self.nnodes!r}", fix="give a number of nodes, or MIN:MAX") from None


def default_path() -> Path:
    """Return the path that `piledriver config` writes and `piledriver launch` reads."""
    environ = environment.snapshot()
    base = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", ".")) / ".config")
    return base / "piledriver" / "launch.yaml"


def resolve_launch_config(
    file: str | None, flags: Mapping[str, Any], accelerate_flags: Mapping[str, Any] | None = None
) -> tuple[LaunchConfig, str]:
    """Return the config of defaults, a file (default: `default_path`, if it exists) and flags, and its origin.

    The file may be a config of Accelerate's; `accelerate_flags` are those of `accelerate launch`.
    """
    path = file if file is not None else str(default_path()) if storage.exists(default_path()) else None
    tree = parse_yaml(storage.read_text(path), path) if path is not None else ConfigTree({}, {}, "defaults")
    if is_accelerate_config(tree.data):
        tree = ConfigTree(launch_fields(flags_from_config(tree.data)), {}, tree.default_origin)
    base = config.build(LaunchConfig, tree)
    theirs = launch_fields(accelerate_flags or {}, base.node_range()[1])
    env = {**base.env, **theirs.get("env", {}), **flags.get("env", {})}
    return dataclasses.replace(base, **{**theirs, **flags, "env": env}), path or "defaults"


def processes_per_node(wanted: LaunchConfig, hardware: Hardware) -> tuple[int, str]:
    """Return how many processes this node starts, and why.

    >>> processes_per_node(LaunchConfig(), Hardware(cuda=4))
    (4, 'one per cuda device')
    """
    if wanted.nproc != "auto":
        return wanted.nproc, "given"
    kind = hardware.best()
    if wanted.cpu or kind in ("cpu", "mps"):
        return 1, "no accelerator; use --nproc N for more CPU processes"
    return hardware.count(kind), f"one per {kind} device"
