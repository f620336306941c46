"""Accelerate's plugins for sharding and other axes (FSDP, ParallelismConfig, TP) as one `Layout`.

They are read by attribute names, so Accelerate's own objects work as well as ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from piledriver.accelerator.errors import OptionError
from piledriver.engine.layout import Layout, Precision
from piledriver.runtime import environment
from piledriver.runtime.world import World

Zero = Literal[0, 1, 2, 3]

_STRATEGIES: dict[str, tuple[Zero, bool]] = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
    "_HYBRID_SHARD_ZERO2": (2, True),
}
"""FSDP's sharding strategies: the zero stage, and whether copies are kept per node."""
_NUMBERS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


class FullyShardedDataParallelPlugin:
    """FSDP options, converted to a `Layout`; defaults come from the variables of `accelerate launch`."""

    def __init__(self, **options: Any) -> None:
        environ = environment.snapshot()
        self.fsdp_version = int(environ.get("FSDP_VERSION", "1"))
        self.sharding_strategy: Any = environ.get("FSDP_SHARDING_STRATEGY")
        self.reshard_after_forward: Any = environ.get("FSDP_RESHARD_AFTER_FORWARD")
        self.cpu_offload: Any = _true(environ.get("FSDP_OFFLOAD_PARAMS"))
        self.activation_checkpointing: Any = _true(environ.get("FSDP_ACTIVATION_CHECKPOINTING"))
        self.forward_prefetch: Any = _true(environ.get("FSDP_FORWARD_PREFETCH"))
        self.state_dict_type: Any = environ.get("FSDP_STATE_DICT_TYPE")
        self.mixed_precision_policy: Any = None
        # The engine decides these: blocks are wrapped one by one, every rank ends with the weights of rank 0.
        self.auto_wrap_policy: Any = None
        self.ignored_modules: Any = None
        self.backward_prefetch: Any = None
        self.param_init_fn: Any = None
        self.limit_all_gathers = self.use_orig_params = self.sync_module_states = True
        self.cpu_ram_efficient_loading = False
        self.__dict__.update(options)
        if self.state_dict_type is None:
            self.state_dict_type = "SHARDED_STATE_DICT" if int(self.fsdp_version) == 2 else "FULL_STATE_DICT"

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Do nothing: the engine shards block by block."""

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the type that parameters are gathered in."""
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = mixed_precision


def fsdp_from_environment() -> FullyShardedDataParallelPlugin | None:
    """Return the plugin that the variables of `accelerate launch --use_fsdp` describe, or None."""
    wanted = _true(environment.snapshot().get("ACCELERATE_USE_FSDP"))
    return FullyShardedDataParallelPlugin() if wanted else None


def layout_from_plugins(
    layout: Layout | None,
    world: World,
    *,
    fsdp_plugin: Any = None,
    torch_tp_plugin: Any = None,
    parallelism: Any = None,
) -> Layout | None:
    """Return the layout that was given, or the one that these plugins describe; None without either."""
    given = {
        name: value
        for name, value in (("fsdp_plugin", fsdp_plugin), ("torch_tp_plugin", torch_tp_plugin))
        if value is not None
    }
    if parallelism is not None:
        given["parallelism_config"] = parallelism
    if not given:
        return layout
    if layout:
        raise OptionError(f"both layout and {next(iter(given))} were given", fix="use the layout alone")
    made = Layout()
    if fsdp_plugin is not None:
        made = _of_fsdp(fsdp_plugin, world)
    if torch_tp_plugin is not None:
        made = replace(made, tp=int(torch_tp_plugin.tp_size))
    if parallelism is not None:
        made = _of_sizes(made, parallelism)
    return made


def _of_fsdp(plugin: Any, world: World) -> Layout:
    strategy = getattr(plugin, "reshard_after_forward", None)
    if not isinstance(strategy, bool | str) or str(strategy).upper() in _STRATEGIES:
        strategy = getattr(plugin, "sharding_strategy", None) or strategy
    zero, hybrid = _stage(strategy)
    policy = getattr(plugin, "mixed_precision_policy", None)
    dtype = policy.get("param_dtype") if isinstance(policy, dict) else getattr(policy, "param_dtype", policy)
    precision: dict[str, Precision] = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
    return Layout(
        zero=zero,
        dp_shard=world.local_size if hybrid and world.size > world.local_size else None,
        precision=precision.get(str(dtype).removeprefix("torch."), "fp32"),
        activations="full" if _true(getattr(plugin, "activation_checkpointing", False)) else "keep",
        offload="parameters" if _offloads(getattr(plugin, "cpu_offload", False)) else "none",
        prefetch=2 if _true(getattr(plugin, "forward_prefetch", False)) else 1,
    )


def _stage(strategy: Any) -> tuple[Zero, bool]:
    """Return zero stage and hybrid flag: of FSDP 2's boolean, or of FSDP 1's name or number of a strategy."""
    text = str(getattr(strategy, "name", strategy)).upper()
    if strategy is None or text == "TRUE":
        return 3, False
    if text == "FALSE":
        return 2, False
    if text.isdigit() and 1 <= int(text) <= len(_NUMBERS):
        text = _NUMBERS[int(text) - 1]
    if text not in _STRATEGIES:
        raise OptionError(f"unknown sharding strategy {strategy!r}", fix=f"choose from {', '.join(_NUMBERS)}")
    return _STRATEGIES[text]


def _of_sizes(layout: Layout, sizes: Any) -> Layout:
    shard, replicate = int(sizes.dp_shard_size), int(sizes.dp_replicate_size)
    sequence = int(getattr(sizes, "sp_size", 1) or 1)
    cp = int(sizes.cp_size)
    zero: Zero = layout.zero if layout.zero else 3 if shard != 1 else 0
    return replace(
        layout,
        zero=zero if shard != 1 or cp > 1 else 0,
        dp_replicate=replicate if shard != -1 or replicate > 1 else None,
        dp_shard=None if shard in (-1, 1) else shard,
        tp=int(sizes.tp_size),
        cp=max(cp, sequence),
        cp_method="all-to-all" if sequence > 1 else "ring",
    )


def _offloads(wanted: Any) -> bool:
    return _true(getattr(wanted, "offload_params", wanted)) or type(wanted).__name__ == "CPUOffloadPolicy"


def _true(wanted: Any) -> bool:
    return wanted is True or str(wanted).lower() in ("true", "1", "yes")
