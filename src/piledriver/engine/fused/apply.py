"""Fuse a model: find candidates, compare each kind with its replacement once, replace what agrees, record the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from piledriver.engine.fused import attention, experts, gated_mlp, norms, output_layer, residual
from piledriver.engine.fused.plain import install, module_kind, why_special, why_special_linear
from piledriver.engine.fused.report import FuseReport, attach_report
from piledriver.engine.mesh import Mesh
from piledriver.engine.precision import compute_dtype, own_transformers

Match = Callable[[nn.Module], tuple[Any, str]]


def fuse(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Replace norms, gated MLPs, experts, attention and output layers of a model by fused ones, in place.

    Our own `Transformer` is fused by construction; modules inside it are not looked at.
    """
    begun = time.monotonic()
    report = FuseReport()
    attach_report(model, report)
    _fuse(report, model, mesh)
    report.seconds = time.monotonic() - begun
    return model


def _fuse(report: FuseReport, model: nn.Module, mesh: Mesh) -> None:
    ours = own_transformers(model)
    inside = {id(module) for transformer in ours for module in transformer.modules()}
    modules = {name: module for name, module in model.named_modules() if id(module) not in inside}
    if ours:
        report.notes.append("Transformer of piledriver: fused by construction")
    if mesh.layout.tp > 1 and not ours:
        report.notes.append(f"tp {mesh.layout.tp} has the output layer and MLPs: they compute on shards")
    _fuse_layers(report, modules, mesh)
    if mesh.layout.pp > 1:
        report.notes.append(f"attention and residual stream are left under pp {mesh.layout.pp}: stages pass tensors on")
    else:
        _fuse_attention(report, model, torch.device(mesh.device_type))
        if not ours:
            _cast_residual(report, model, mesh)
    _fuse_output(report, model, modules, mesh)
    if any("Rotary" in type(module).__name__ for module in modules.values()):
        report.notes.append("rotary embedding: the model's own; compiled blocks fuse it")


def _fuse_layers(report: FuseReport, modules: dict[str, nn.Module], mesh: Mesh) -> None:
    """Replace what computes each token by itself: norms, gated MLPs, experts."""
    device = torch.device(mesh.device_type)
    _replace(
        report,
        norms.OPERATION,
        {name: module for name, module in modules.items() if norms.is_norm(module)},
        lambda module: norms.match_norm(module, device, recompute=mesh.layout.recompute_norms),
    )
    _replace(
        report,
        gated_mlp.OPERATION,
        {name: module for name, module in modules.items() if gated_mlp.is_gated_mlp(module)},
        lambda module: gated_mlp.match_mlp(module, device),
    )
    _replace(
        report,
        experts.OPERATION,
        {name: module for name, module in modules.items() if experts.is_experts(module)},
        lambda module: experts.match_experts(module, device),
    )


def _cast_residual(report: FuseReport, model: nn.Module, mesh: Mesh) -> None:
    dtype = compute_dtype(mesh.layout)
    names = residual.cast_block_inputs(model, dtype) if dtype is torch.bfloat16 else []
    if names:
        kind = type(model.get_submodule(names[0])).__name__
        report.replace(residual.OPERATION, kind, names, "inputs of blocks are cast to bf16")


def _replace(report: FuseReport, operation: str, candidates: dict[str, nn.Module], match: Match) -> None:
    """Compare one module of each kind, and replace all of the kinds that agree."""
    groups: dict[Hashable, list[str]] = {}
    for name, module in candidates.items():
        groups.setdefault((module_kind(module), _peculiarity(module)), []).append(name)
    for names in groups.values():
        first = candidates[names[0]]
        forward, what = match(first)
        if forward is None:
            report.leave(operation, type(first).__name__, names, what)
            continue
        for name in names:
            install(candidates[name], forward)
        report.replace(operation, type(first).__name__, names, what)


def _peculiarity(module: nn.Module) -> Hashable:
    """Return what sets a module apart from others of its kind: hooks and replaced forwards, here and inside."""
    return tuple((name, why) for name, child in module.named_modules() if (why := why_special(child)) is not None)


def _fuse_attention(report: FuseReport, model: nn.Module, device: torch.device) -> None:
    for name, module in attention.attention_models(model).items():
        agrees, what = attention.match_attention(module, device)
        (report.replace if agrees else report.leave)(
            attention.OPERATION, type(module).__name__, [name or "itself"], what
        )
        if agrees:
            attention.install_attention(module)
        # On a CPU nothing waits.
        if attention.has_kernels(device) and attention.expect_packing_only_with_positions(module):
            report.notes.append("packed documents are looked for only where a call gives position_ids")


def _fuse_output(report: FuseReport, model: nn.Module, modules: dict[str, nn.Module], mesh: Mesh) -> None:
    for name, layer in output_layer.output_layers(model).items():
        if name not in modules:
            continue
        why = why_special_linear(layer)
        if mesh.layout.pp > 1:
            why = "the last stage of a pipeline returns its logits"
        elif mesh.layout.compile == "model" and not output_layer.bodies_of(model, layer):
            why = "compile 'model' has the logits inside its graph: no submodule holds all blocks and not the output"
        if why is not None:
            report.leave(output_layer.OPERATION, type(layer).__name__, [name], why)
            continue
        output_layer.install_output_layer(layer)
        report.replace(
            output_layer.OPERATION, type(layer).__name__, [name], "in chunks; logits are computed only if read"
        )
