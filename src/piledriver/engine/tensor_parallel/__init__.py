"""Tensor and sequence parallelism (Shoeybi et al., 2019; Korthikanti et al., 2022)."""

from __future__ import annotations

from torch import nn

from piledriver.engine.mesh import Mesh


def apply_tp(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Shard the matrices of a model over the tp axis, in place: parameters become `DTensor`s."""
    if mesh.layout.tp == 1 or mesh.alone:
        return model
    from piledriver.engine.tensor_parallel.apply import shard_matrices

    return shard_matrices(model, mesh)
