"""MII's settings in ours: model config and generation parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from piledriver.core.errors import UsageError, nearest

_log = logging.getLogger("piledriver.compat.mii")

IGNORED = frozenset(
    {
        "deployment_type",
        "device_map",
        "enable_restful_api",
        "hf_auth_token",
        "inference_engine_config",
        "instance_type",
        "load_balancer_config",
        "profile_model_time",
        "replica_configs",
        "restful_api_host",
        "restful_processes",
        "sync_debug",
        "torch_dist_port",
        "version",
        "zmq_port_number",
    }
)
"""Settings of MII's own processes, ports and batching: the engine has no such processes and sizes itself."""
ONLY = {"task": ("text-generation",), "tensor_parallel": (1,), "replica_num": (1,), "quantization_mode": (None,)}
"""Settings of which only these values are supported."""
MODEL_KEYS = frozenset({"model_name_or_path", "tokenizer", "max_length", *ONLY, *IGNORED})
SERVER_KEYS = frozenset({"deployment_name", "port_number", "restful_api_port"})
GENERATION = frozenset(
    {"max_length", "max_new_tokens", "min_new_tokens", "stream", "ignore_eos", "return_full_text"}
    | {"do_sample", "top_p", "top_k", "temperature", "stop", "seed"}
)


def model_settings(
    model_name_or_path: str, model_config: Mapping[str, Any] | None, given: Mapping[str, Any], known: frozenset[str]
) -> dict[str, Any]:
    """Return the settings of a model, from MII's dictionary and keyword arguments; a contradiction is an error."""
    settings: dict[str, Any] = dict(model_config or {})
    for name, value in {**({"model_name_or_path": model_name_or_path} if model_name_or_path else {}), **given}.items():
        if name in settings and settings[name] != value:
            raise UsageError(f"{name} is given twice: {settings[name]!r} and {value!r}", fix="give it once")
        settings[name] = value
    for name, value in settings.items():
        if name not in known:
            close = nearest(name, known)
            raise UsageError(f"unknown setting {name!r}", fix=f"did you mean {close!r}?" if close else "leave it out")
        if name in ONLY and value not in ONLY[name]:
            raise UsageError(f"{name} is {value!r}", fix=f"only {ONLY[name][0]!r} is supported here")
    if (settings.get("inference_engine_config") or {}).get("quantization"):
        raise UsageError("inference_engine_config.quantization is not supported", fix="serve a quantised folder")
    without_effect = sorted(settings.keys() & IGNORED)
    if without_effect:
        _log.info("settings of MII that have no effect here: %s", ", ".join(without_effect))
    if not settings.get("model_name_or_path"):
        raise UsageError("no model is given", fix="give model_name_or_path, a model folder")
    return settings


def generation_settings(given: Mapping[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """Return fields of `SamplingParams` for MII's generation parameters; its defaults are kept."""
    unknown = sorted(given.keys() - GENERATION)
    if unknown:
        close = nearest(unknown[0], GENERATION)
        raise UsageError(
            f"unknown generation parameter {unknown[0]!r}", fix=f"did you mean {close!r}?" if close else "leave it out"
        )
    new = given.get("max_new_tokens")
    if new is None:
        new = int(given.get("max_length") or 1024) - prompt_tokens
    if new < 1:
        raise UsageError(f"max_length leaves {new} tokens for the answer", fix="raise max_length or shorten the prompt")
    stop = given.get("stop") or ()
    temperature = given.get("temperature")
    return {
        "max_tokens": new,
        "min_tokens": int(given.get("min_new_tokens") or 0),
        "ignore_eos": bool(given.get("ignore_eos", False)),
        "temperature": (1.0 if temperature is None else temperature) if given.get("do_sample", True) else 0.0,
        "top_p": given.get("top_p", 0.9),
        "top_k": given.get("top_k") or 0,
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "seed": given.get("seed"),
    }
