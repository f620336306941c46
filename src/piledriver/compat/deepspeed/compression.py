"""`deepspeed.compression`: the `compression_training` section of a DeepSpeed config over `compress.scheduled`.

`init_compression(model, config)` makes matching layers follow the config's rules; the loop calls
`model.compression_scheduler.step()` after each optimizer step; `redundancy_clean(model, config)` makes the result
permanent, with smaller layers where rows, heads or channels go. Every key is understood, ignored with a log line
because it has no meaning here, or rejected with the reason.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from piledriver.compress.scheduled import (
    ActivationRule,
    MaskRule,
    WeightRule,
    attach_rule,
    clean_layer,
    remove_inputs,
    scheduled_layers,
)
from piledriver.compress.scheduled.clean import remove_outputs
from piledriver.core.errors import UsageError, suggest
from piledriver.models import Transformer

_log = logging.getLogger("piledriver.compat.deepspeed")

METHODS = (
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
)
_SHARED: dict[str, frozenset[str]] = {
    "weight_quantization": frozenset(
        {"enabled", "quantizer_kernel", "schedule_offset", "quantize_groups", "quantize_verbose", "quantization_type"}
        | {"rounding", "quantize_weight_in_forward", "fp16_mixed_quantize"}
    ),
    "activation_quantization": frozenset({"enabled", "quantization_type", "range_calibration", "schedule_offset"}),
    "sparse_pruning": frozenset(
        {"enabled", "method", "schedule_offset", "schedule_offset_end", "schedule_offset_stride", "block_pattern"}
        | {"dense_ratio", "excluded_modules"}
    ),
    "row_pruning": frozenset({"enabled", "method", "schedule_offset"}),
    "head_pruning": frozenset({"enabled", "method", "schedule_offset", "num_heads"}),
    "channel_pruning": frozenset({"enabled", "method", "schedule_offset"}),
}
_GROUP = frozenset({"params", "modules", "related_modules"})
_PARAMS: dict[str, frozenset[str]] = {
    "weight_quantization": frozenset({"start_bits", "target_bits", "quantization_period"}),
    "activation_quantization": frozenset({"bits"}),
    **dict.fromkeys(("sparse_pruning", "row_pruning", "head_pruning", "channel_pruning"), frozenset({"dense_ratio"})),
}
_LAYER_REDUCTION = frozenset(
    {"enabled", "keep_number_layer", "module_name_prefix", "teacher_layer", "other_module_name"}
)
_KINDS: dict[str, Any] = {
    "sparse_pruning": "weights",
    "row_pruning": "rows",
    "head_pruning": "heads",
    "channel_pruning": "channels",
}
IGNORED = {
    "quantizer_kernel": "it chooses a CUDA kernel of DeepSpeed",
    "quantize_verbose": "it prints DeepSpeed's progress",
    "quantize_weight_in_forward": "weights are always rounded in the forward, and gradients reach the full ones",
}


class Group(NamedTuple):
    """One entry of `different_groups`, with the settings of its method."""

    method: str
    rule: WeightRule | ActivationRule | MaskRule
    modules: list[str]
    related: list[list[str]]


class CompressionScheduler:
    """Tells the layers of a model which training step they are in."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.training_steps = model, 0

    def step(self, step_zero_check: bool = False) -> None:
        """Count one optimizer step."""
        if not step_zero_check:
            self.training_steps += 1
        for _, layer in scheduled_layers(self.model):
            layer.state().step = self.training_steps


def init_compression(
    model: nn.Module,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any],
    teacher_model: nn.Module | None = None,
    mpu: Any = None,
) -> nn.Module:
    """Make the layers of a model follow a `compression_training` section, in place; return the model."""
    if mpu is not None:
        raise UsageError("mpu is given", fix="leave it out: compress the whole model, then apply a layout")
    section = read_section(deepspeed_config)
    if _reduces_layers(section):
        if teacher_model is None:
            raise UsageError("layer_reduction needs teacher_model", fix="give the model whose layers are copied")
        student_initialization(model, teacher_model, deepspeed_config)
    for group in parse_groups(section):
        found = list(_matching(model, group.modules, group.method))
        if not found:
            _log.warning("%s: modules %s match no layer", group.method, group.modules)
        if isinstance(model, Transformer) and group.method in ("row_pruning", "head_pruning"):
            raise UsageError(
                f"{group.method} of a model of this library, whose projections are fused",
                fix="use piledriver.compress.prune with a SmallerShape",
            )
        for _, layer in found:
            rule = group.rule
            if isinstance(rule, MaskRule) and rule.kind == "heads":
                rule = _shared_heads(model, layer, rule, group)
            attach_rule(layer, rule)
    model.compression_scheduler = CompressionScheduler(model)  # type: ignore[assignment]
    return model


def redundancy_clean(
    model: nn.Module, deepspeed_config: str | os.PathLike[str] | Mapping[str, Any], mpu: Any = None
) -> nn.Module:
    """Make the compression of a model permanent, in place; return the model with plain layers.

    Rows, channels and heads that are masked are removed, also from the `related_modules`, where the config names those.
    """
    if mpu is not None:
        raise UsageError("mpu is given", fix="leave it out: gather the model first")
    groups = [group for group in parse_groups(read_section(deepspeed_config)) if group.related]
    kept = {name: clean_layer(layer) for name, layer in list(scheduled_layers(model))}
    for group in groups:
        kind = _KINDS[group.method]
        names = [name for name, _ in _matching(model, group.modules, group.method)]
        for name, related in zip(names, _related(model, names, group), strict=True):
            parts = kept.get(name, {}).get(kind)
            if parts is not None:
                _remove(model, name, related, parts, group)
    if "compression_scheduler" in model.__dict__:
        del model.__dict__["compression_scheduler"]
    return model


def _remove(model: nn.Module, name: str, related: list[str], parts: Tensor, group: Group) -> None:
    """Remove what is not kept from a layer and from those that are related to it."""
    layer: Any = model.get_submodule(name)
    if not isinstance(group.rule, MaskRule) or group.rule.kind != "heads":
        remove_outputs(layer, parts)
        for other in related:
            remove_inputs(model.get_submodule(other), parts)
        return
    heads = layer.in_features // _head_width(model, layer, related, group.rule)
    remove_inputs(layer, _columns(parts, layer.in_features // heads))
    for other in related:
        projection: Any = model.get_submodule(other)
        remove_outputs(projection, _columns(parts, projection.out_features // heads))


def _columns(parts: Tensor, width: int) -> Tensor:
    return (parts[:, None] * width + torch.arange(width, device=parts.device)).flatten()


def student_initialization(
    student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: str | os.PathLike[str] | Mapping[str, Any]
) -> nn.Module:
    """Copy the layers of a teacher that `layer_reduction` names into a shallower student, in place; return it."""
    settings = read_section(deepspeed_config).get("layer_reduction") or {}
    _check_keys("layer_reduction", settings, _LAYER_REDUCTION)
    for key in ("module_name_prefix", "teacher_layer"):
        if key not in settings:
            raise UsageError(f"layer_reduction has no {key}", fix="add it")
    prefix, layers = settings["module_name_prefix"], list(settings["teacher_layer"])
    number = settings.get("keep_number_layer", len(layers))
    if number != len(layers):
        raise UsageError(f"keep_number_layer is {number}, teacher_layer names {len(layers)}", fix="make them equal")
    pairs = [(f"{prefix}.{place}", f"{prefix}.{layer}") for place, layer in enumerate(layers)]
    pairs += [(name, name) for name in settings.get("other_module_name", ())]
    for ours, theirs in pairs:
        try:
            source, target = teacher_model.get_submodule(theirs), student_model.get_submodule(ours)
        except AttributeError as error:
            raise UsageError(f"layer_reduction names {theirs} and {ours}: {error}", fix="check the prefix") from error
        target.load_state_dict(source.state_dict())
    return student_model


def read_section(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked `compression_training` section of a config, a file or a mapping."""
    if not isinstance(config, Mapping):
        try:
            with open(config, encoding="utf-8") as file:
                config = json.load(file)
        except (OSError, ValueError) as error:
            raise UsageError(f"{os.fspath(config)} is not a DeepSpeed config: {error}", fix="give its path") from error  # type: ignore[arg-type]
    assert isinstance(config, Mapping)
    section = config.get("compression_training", {})
    if not isinstance(section, Mapping):
        raise UsageError("compression_training is not a mapping", fix="see DeepSpeed's compression tutorial")
    _check_keys("compression_training", section, frozenset({"layer_reduction", *METHODS}))
    return dict(section)


def parse_groups(section: Mapping[str, Any]) -> Iterator[Group]:
    """Yield the groups of every method that is enabled, in the order in which DeepSpeed applies them."""
    for method in METHODS:
        settings = section.get(method) or {}
        _check_keys(method, settings, frozenset({"shared_parameters", "different_groups"}))
        shared = settings.get("shared_parameters") or {}
        _check_keys(f"{method}.shared_parameters", shared, _SHARED[method])
        if not shared.get("enabled", False):
            continue
        _reject(method, shared)
        for name, group in (settings.get("different_groups") or {}).items():
            where = f"{method}.different_groups.{name}"
            _check_keys(where, group, _GROUP)
            params = group.get("params") or {}
            _check_keys(f"{where}.params", params, _PARAMS[method])
            yield Group(
                method,
                _rule(method, where, shared, params),
                list(group.get("modules") or ["*"]),
                [list(one) for one in group.get("related_modules") or []],
            )


def _rule(
    method: str, where: str, shared: Mapping[str, Any], params: Mapping[str, Any]
) -> WeightRule | ActivationRule | MaskRule:
    offset = int(shared.get("schedule_offset", 1000 if method == "activation_quantization" else 0))
    symmetric = _choice(method, shared, "quantization_type", ("symmetric", "asymmetric")) == "symmetric"
    if method == "weight_quantization":
        target = int(_needed(where, params, "target_bits"))
        start = int(params.get("start_bits", target))
        if not 1 < target <= start <= 16:
            raise UsageError(
                f"{where}: start_bits {start}, target_bits {target}", fix="give 2 <= target <= start <= 16"
            )
        return WeightRule(
            target_bits=target,
            start_bits=start,
            period=int(params.get("quantization_period", 1)),
            groups=int(shared.get("quantize_groups", 1)),
            symmetric=symmetric,
            offset=offset,
        )
    if method == "activation_quantization":
        static = _choice(method, shared, "range_calibration", ("dynamic", "static")) == "static"
        bits = int(_needed(where, params, "bits"))
        return ActivationRule(bits=bits, symmetric=symmetric, static=static, offset=offset)
    keep = float(_needed(where, params, "dense_ratio"))
    if not 0 < keep <= 1:
        raise UsageError(f"{where}: dense_ratio is {keep}", fix="give a share between 0 and 1")
    chosen = _choice(method, shared, "method", ("topk", "l1") if method == "head_pruning" else ("l1", "topk"))
    heads = int(_needed(f"{method}.shared_parameters", shared, "num_heads")) if method == "head_pruning" else 1
    return MaskRule(kind=_KINDS[method], keep=keep, method=chosen, heads=heads, offset=offset)  # type: ignore[arg-type]


def _reject(method: str, shared: Mapping[str, Any]) -> None:
    """Raise for settings that would change the result and are not supported; log those that mean nothing here."""
    if method == "weight_quantization":
        if shared.get("rounding", "nearest") != "nearest":
            raise UsageError(
                f"weight_quantization.rounding is {shared['rounding']!r}: weights are rounded in every forward, where "
                "noise would differ from pass to pass",
                fix="use nearest",
            )
        if (shared.get("fp16_mixed_quantize") or {}).get("enabled", False):
            raise UsageError(
                "weight_quantization.fp16_mixed_quantize mixes full and rounded weights in DeepSpeed's fp16 optimizer",
                fix="disable it, and lower start_bits with quantization_period",
            )
    if method == "sparse_pruning" and shared.get("method") == "snip_momentum":
        raise UsageError(
            "sparse_pruning.method snip_momentum is Intel Neural Compressor's, with its own schedule",
            fix="use l1 or topk, or piledriver.compress.prune",
        )
    for key in ("block_pattern", "schedule_offset_end", "schedule_offset_stride", "excluded_modules", "dense_ratio"):
        if method == "sparse_pruning" and key in shared:
            raise UsageError(f"sparse_pruning.{key} belongs to snip_momentum", fix="remove it")
    for key, why in IGNORED.items():
        if key in shared:
            _log.info("%s.%s is ignored: %s", method, key, why)


def _matching(model: nn.Module, patterns: Sequence[str], method: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers whose names a pattern (a regular expression, as in DeepSpeed) is found in."""
    wanted: tuple[type[nn.Module], ...] = (nn.Conv2d,) if method == "channel_pruning" else (nn.Linear,)
    if method in ("weight_quantization", "activation_quantization", "sparse_pruning"):
        wanted = (nn.Linear, nn.Conv2d)
    for name, module in model.named_modules():
        if isinstance(module, wanted) and any(one == "*" or re.search(one, name) for one in patterns):
            yield name, module


def _related(model: nn.Module, names: Sequence[str], group: Group) -> list[list[str]]:
    """Return for each layer of a group the names of its related ones: those of the same place in the order of names."""
    found: list[list[str]] = [[] for _ in names]
    for patterns in group.related:
        for pattern in patterns:
            matches = [
                name for name, module in model.named_modules() if re.search(pattern, name) and _has_weight(module)
            ]
            if len(matches) != len(names):
                raise UsageError(
                    f"{group.method}: related module {pattern!r} matches {len(matches)} layers for {len(names)}",
                    fix="let each layer have one related layer for each pattern",
                )
            for place, match in zip(found, matches, strict=True):
                place.append(match)
    return found


def _has_weight(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Conv2d, nn.modules.batchnorm._BatchNorm))


def _shared_heads(model: nn.Module, layer: Any, rule: MaskRule, group: Group) -> MaskRule:
    """Return the rule with heads in whole groups, where related projections have fewer (grouped-query attention)."""
    fewest = layer.in_features
    for patterns in group.related:
        for pattern in patterns:
            rows = [
                m.out_features for n, m in model.named_modules() if re.search(pattern, n) and isinstance(m, nn.Linear)
            ]
            fewest = min([fewest, *rows])
    heads = rule.heads * fewest // layer.in_features
    return MaskRule(kind=rule.kind, keep=rule.keep, method=rule.method, heads=heads, offset=rule.offset)


def _head_width(model: nn.Module, layer: Any, related: Sequence[str], rule: MaskRule) -> int:
    """Return the input columns of a head, or of a group of heads that share keys and values."""
    fewest = min([layer.in_features, *(model.get_submodule(name).out_features for name in related)])
    heads = rule.heads * int(fewest) // layer.in_features
    return int(layer.in_features // heads)


def _reduces_layers(section: Mapping[str, Any]) -> bool:
    return bool((section.get("layer_reduction") or {}).get("enabled", False))


def _check_keys(where: str, given: Any, known: frozenset[str]) -> None:
    if not isinstance(given, Mapping):
        raise UsageError(f"{where} is not a mapping", fix="see DeepSpeed's compression tutorial")
    for key in given:
        if key not in known:
            raise UsageError(f"{where} has no key {key!r}", fix=suggest(str(key), known))


def _choice(where: str, given: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str:
    value = given.get(key, choices[0])
    if value not in choices:
        raise UsageError(f"{where}.{key} is {value!r}", fix=f"use {' or '.join(choices)}")
    return str(value)


def _needed(where: str, given: Mapping[str, Any], key: str) -> Any:
    if key not in given:
        raise UsageError(f"{where} has no {key}", fix="add it")
    return given[key]
