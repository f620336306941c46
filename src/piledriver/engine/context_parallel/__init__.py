"""Context parallelism: every sequence is sharded over the cp axis (ring attention, or Ulysses all-to-all)."""

from __future__ import annotations

from torch import nn

from piledriver.engine.mesh import Mesh


def apply_cp(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Shard the sequences that a model reads over the cp axis, in place. Comes after tensor parallelism."""
    if mesh.layout.cp == 1 or mesh.alone:
        return model
    from piledriver.engine.context_parallel.apply import shard_sequences

    return shard_sequences(model, mesh)
