"""Pipeline parallelism: a model split into stages, and whole batches run through them by a schedule.

`split_stages` keeps of a model what this rank's stages need (the first step of `apply`); `stages_of` returns the
modules that run; `run_as_pipeline` makes a call of the model run a whole batch through all stages. torch's pipelining
takes a second to import, so it is imported only where a layout asks for it.
"""

from __future__ import annotations

import torch
from torch import nn

from piledriver.engine.mesh import Mesh


def split_stages(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Keep of a model what this rank's stages need, in place."""
    if mesh.layout.pp == 1:
        return model
    from piledriver.engine.pipeline_parallel.split import keep_own_stages

    return keep_own_stages(model, mesh)


def stages_of(model: nn.Module, mesh: Mesh) -> list[nn.Module]:
    """Return the modules that run this rank's stages, each sharded as one root; for an unsplit model, itself.

    They share their parts with the model, so call this once the steps that replace or wrap modules are done.
    """
    if mesh.layout.pp == 1:
        return [model]
    from piledriver.engine.pipeline_parallel.split import made_stages

    return made_stages(model)


def run_as_pipeline(model: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Make a call of the model run a whole batch through all stages."""
    if mesh.layout.pp == 1 or mesh.alone:
        return
    from piledriver.engine.pipeline_parallel.model_call import call_as_pipeline

    call_as_pipeline(model, mesh, device)
