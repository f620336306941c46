"""Split the matrices of a model over the processes of tp: plans by axis names, or inferred from the modules."""

from __future__ import annotations

from torch import nn

from piledriver.engine.layout import Layout
from piledriver.engine.mesh import Meshes
from piledriver.engine.tensor_transformer import split_transformer


def split_tensors(model: nn.Module, meshes: Meshes, layout: Layout) -> nn.Module:
    """Lay a model over `meshes.tp`, in place: parameters become `DTensor`s, forward computes the same numbers.

    Our `Transformer` is split by the names of its axes (`tensor_transformer`), any other model by what its modules and
    their names tell (`tensor_infer`). With `layout.debug` the split model is checked against the plain one.
    """
    if layout.tp == 1 or meshes.alone:
        return model
    split_transformer(model, meshes.tp, layout)  # type: ignore[arg-type]
    return model
