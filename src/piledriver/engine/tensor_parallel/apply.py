"""Choose how to shard a model over tp: by the axis names of our models, or by roles inferred from the modules."""

from __future__ import annotations

import copy

from torch import nn

from piledriver.engine.mesh import Mesh
from piledriver.engine.tensor_parallel.inferred import split_inferred
from piledriver.engine.tensor_parallel.transformer import split_transformer
from piledriver.engine.tensor_parallel.verify import check_same
from piledriver.models import Transformer


def shard_matrices(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Shard a model over `mesh.tp`, in place; its forward computes the same numbers.

    Our `Transformer` is sharded by the names of its axes (`transformer.py`), other models by the roles of their modules
    (`inferred.py`). All ranks hold the same weights before. With `layout.debug` the sharded model is checked against a
    copy of the plain one.
    """
    layout = mesh.layout
    checked = layout.debug and layout.pp == 1 and layout.ep == 1 and not any(p.is_meta for p in model.parameters())
    plain = copy.deepcopy(model) if checked else None
    if isinstance(model, Transformer):
        split_transformer(model, mesh.tp, layout)
    else:
        split_inferred(model, mesh.tp)
    if plain is not None:
        check_same(plain, model, mesh.tp)
    return model
