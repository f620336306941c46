"""Load a model folder as a shard on each rank."""

from __future__ import annotations

from functools import partial

import torch

from piledriver.core import storage
from piledriver.engine import Layout
from piledriver.engine.apply import apply
from piledriver.engine.mesh import make_mesh
from piledriver.models import Transformer
from piledriver.models.interchange import load_weights, read_folder_config, read_generation, stored_dtype
from piledriver.serve.errors import ServeError


def load_sharded(
    folder: storage.Location, layout: Layout, *, device: torch.device, dtype: torch.dtype | None = None
) -> Transformer:
    """Return this rank's shard of a model folder; all ranks call this together, in connected processes.

    Only tensor parallelism serves: other axes of the layout must be 1.
    """
    wanted = Layout(tp=layout.tp, sequence_parallel=False)  # steps are too short to divide
    others = {"pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "zero": layout.zero + 1}
    wrong = [name for name, size in others.items() if size > 1]
    if wrong:
        raise ServeError(f"a layout with {wrong[0]} cannot be served", fix="use tp alone, such as Layout(tp=2)")
    config, theirs = read_folder_config(folder)
    if theirs.get("quantization_config"):
        raise ServeError(f"{folder} has quantised weights, which are not sharded", fix="serve it without tp")
    with torch.device("meta"):
        model = Transformer(config).to(dtype or stored_dtype(folder)).requires_grad_(False)
    mesh = make_mesh(wanted, device.type)
    if mesh.layout.tp != mesh.size:
        raise ServeError(f"tp is {layout.tp}, but there are {mesh.size} processes", fix=f"use tp={mesh.size}")
    apply(model, mesh, device=device, weights=partial(load_weights, folder=folder))
    model.source_config, model.generation = theirs, read_generation(folder, theirs)
    return model
