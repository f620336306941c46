"""Flags and YAML config of `accelerate launch`, translated to the fields of a `LaunchConfig`.

Settings that only the script's `Accelerator` reads (FSDP, compiler, mesh sizes) become the environment variables that
Accelerate's launcher sets. Engines that a `Layout` replaces are rejected.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from piledriver.core.errors import UsageError

_NUMBERS = ("num_processes", "num_machines", "machine_rank", "main_process_port", "num_cpu_threads_per_process")
_TEXTS = (
    *("main_process_ip", "gpu_ids", "rdzv_backend", "rdzv_conf", "monitor_interval", "role", "tee"),
    *("main_training_function", "dynamo_backend", "dynamo_mode"),
    *(
        f"fsdp_{name}"
        for name in (
            *("version", "offload_params", "min_num_params", "sharding_strategy", "reshard_after_forward"),
            *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "backward_prefetch", "state_dict_type"),
            *("forward_prefetch", "use_orig_params", "cpu_ram_efficient_loading", "sync_module_states"),
            *("activation_checkpointing", "activation_checkpointing_offload"),
        )
    ),
    *(
        f"parallelism_config_{axis}"
        for axis in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy")
    ),
    *("parallelism_config_sp_size", "parallelism_config_sp_backend"),
)
_SWITCHES = (
    *("multi_gpu", "same_network", "enable_cpu_affinity", "quiet", "downcast_bf16", "use_fsdp", "use_deepspeed"),
    *("use_megatron_lm", "use_parallelism_config", "tpu", "no_python", "dynamo_use_fullgraph", "dynamo_use_dynamic"),
    "dynamo_use_regional_compilation",
)
_REJECTED = {
    "use_deepspeed": "use Layout(zero=..., offload=...) in the script, or --use_fsdp",
    "use_megatron_lm": "use Layout(tp=..., pp=...) in the script",
    "tpu": "start one process with PJRT_DEVICE=TPU",
    "no_python": "run the program without a launcher",
}
_ENGINES = {"DEEPSPEED": "use_deepspeed", "MEGATRON_LM": "use_megatron_lm", "XLA": "tpu", "TPU": "tpu"}


def add_accelerate_flags(parser: argparse.ArgumentParser) -> None:
    """Accept `accelerate launch`'s flags, with `_` or `-`, without listing them in the help."""
    for name in (*_NUMBERS, *_TEXTS, *_SWITCHES):
        kind: dict[str, Any] = {"action": "store_true"} if name in _SWITCHES else {}
        if name in _NUMBERS:
            kind = {"type": int}
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kind)


def given_accelerate_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of `add_accelerate_flags` that were given."""
    known = {*_NUMBERS, *_TEXTS, *_SWITCHES}
    return {name: value for name, value in vars(args).items() if name in known}


def is_accelerate_config(content: Mapping[str, Any]) -> bool:
    """Return whether the content of a YAML file is a config of Accelerate's and not of ours."""
    return "distributed_type" in content or "compute_environment" in content


def flags_from_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that an Accelerate config stands for.

    >>> flags_from_config({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "num_processes": 8})
    {'num_processes': 8, 'fsdp_version': 2, 'use_fsdp': True}
    """
    flags = {key: value for key, value in content.items() if not isinstance(value, dict) and value is not None}
    for part in ("fsdp_config", "dynamo_config", "parallelism_config"):
        flags |= content.get(part) or {}
    kind = str(flags.pop("distributed_type", "NO"))
    if content.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise UsageError(f"compute_environment is {content['compute_environment']}", fix="use LOCAL_MACHINE")
    if kind in _ENGINES:
        flags[_ENGINES[kind]] = True
    if kind == "FSDP":
        flags["use_fsdp"] = True
    if content.get("parallelism_config"):
        flags["use_parallelism_config"] = True
    if flags.pop("use_cpu", False) or kind == "MULTI_CPU":
        flags["cpu"] = True
    if flags.get("mixed_precision") is False:
        flags["mixed_precision"] = "no"  # which YAML reads as a truth value where it is not quoted
    return flags


def launch_fields(flags: Mapping[str, Any], nodes: int = 1) -> dict[str, Any]:
    """Return the fields of `LaunchConfig` that Accelerate's flags stand for; `nodes` holds if they do not say.

    >>> launch_fields({"num_processes": 8, "num_machines": 2, "machine_rank": 1, "main_process_ip": "node0"})
    {'nproc': 4, 'nnodes': '2', 'node_rank': 1, 'rdzv_endpoint': 'node0:29500'}
    """
    for name, fix in _REJECTED.items():
        if flags.get(name):
            raise UsageError(f"--{name} is not supported", fix=fix)
    fields: dict[str, Any] = {}
    nodes = int(flags.get("num_machines") or nodes)
    processes = int(flags.get("num_processes") or 0)
    if processes > 0:
        if processes % nodes:
            raise UsageError(
                f"--num_processes is {processes} on {nodes} machines", fix="give a multiple of --num_machines"
            )
        fields["nproc"] = processes // nodes
    if nodes > 1:
        fields["nnodes"] = str(nodes)
        if flags.get("machine_rank") is not None:
            fields["node_rank"] = int(flags["machine_rank"])
    address, port = flags.get("main_process_ip"), int(flags.get("main_process_port") or 0)
    if nodes > 1 and address:
        fields["rdzv_endpoint"] = f"{address}:{port or 29500}"
    elif nodes == 1 and port:
        fields["rdzv_endpoint"] = f"localhost:{port}"
    for theirs, ours in (("cpu", "cpu"), ("enable_cpu_affinity", "bind_numa"), ("debug", "debug_collectives")):
        if flags.get(theirs):
            fields[ours] = True
    for same in ("mixed_precision", "gradient_accumulation_steps", "max_restarts", "log_dir"):
        if flags.get(same) is not None:
            fields[same] = flags[same]
    if env := _environment(flags):
        fields["env"] = env
    return fields


def _environment(flags: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that carry settings to the script's `Accelerator`."""
    found: dict[str, Any] = {}
    if str(flags.get("gpu_ids") or "all") != "all":
        found["CUDA_VISIBLE_DEVICES"] = flags["gpu_ids"]
    if flags.get("num_cpu_threads_per_process"):
        found["OMP_NUM_THREADS"] = flags["num_cpu_threads_per_process"]
    for switch, prefix in (("use_fsdp", "fsdp_"), ("use_parallelism_config", "parallelism_config_")):
        if flags.get(switch):
            found[f"ACCELERATE_{switch.upper()}"] = "true"
            found |= {name.upper(): value for name, value in flags.items() if name.startswith(prefix)}
    found |= {f"ACCELERATE_{name.upper()}": value for name, value in flags.items() if name.startswith("dynamo_")}
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in found.items()}
