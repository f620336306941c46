"""Split the matrices of a model over the processes of tp: plans by axis names, or inferred from the modules."""

from __future__ import annotations

import copy

from torch import nn

from piledriver.engine.layout import Layout
from piledriver.engine.mesh import Mesh
from piledriver.engine.tensor_parallel.inferred import split_inferred
from piledriver.engine.tensor_parallel.transformer import split_transformer
from piledriver.engine.tensor_parallel.verify import check_same
from piledriver.models import Transformer


def apply_tp(model: nn.Module, mesh: Mesh, layout: Layout) -> nn.Module:
    """Lay a model over `mesh.tp`, in place: parameters become `DTensor`s, forward computes the same numbers.

    Our `Transformer` is split by the names of its axes (`tensor_transformer`), any other model by what its modules and
    their names tell (`tensor_infer`). All processes hold the same weights before. With `layout.debug` the split model
    is checked against a copy of the plain one.
    """
    if layout.tp == 1 or mesh.alone:
        return model
    checked = layout.debug and layout.pp == 1 and layout.ep == 1 and not any(p.is_meta for p in model.parameters())
    plain = copy.deepcopy(model) if checked else None
    if isinstance(model, Transformer):
        split_transformer(model, mesh.tp, layout)
    else:
        split_inferred(model, mesh.tp)
    if plain is not None:
        check_same(plain, model, mesh.tp)
    return model
