"""Zero 1 and 2 with streamed weights: bring together, block by block, the rows that the ranks have stepped on.

Each rank has the whole weights in host memory or on disk and steps on its rows of the masters. After a step the rows of
a block are all-gathered on the device and written to the rank's source, from which the block is streamed.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.distributed.device_mesh import DeviceMesh

from piledriver.engine.offload.master import MasterWeight
from piledriver.engine.offload.stream.parameter_block import ParameterBlock, StreamedParameter
from piledriver.engine.offload.stream.training_stream import TrainingStream
from piledriver.engine.shards.owned_rows import gather_rows


@torch.no_grad()
def gather_sources(stream: TrainingStream, axis: DeviceMesh, masters: Collection[MasterWeight]) -> None:
    """Write new rows of some masters, of all ranks, to the sources of a stream. All ranks of the axis call this."""
    stream.evict_all()
    for block in stream.blocks:
        held = [weight for weight in block.weights if weight.master in masters]
        for weight in held:
            weight.allocate()
            _put_own_rows(block, weight)
        divided = [weight for weight in held if weight.target.dim()]
        for dtype in dict.fromkeys(weight.target.dtype for weight in divided):
            gather_rows([weight.master.parameter for weight in divided if weight.target.dtype == dtype], axis)
        for weight in held:
            weight.write(weight.target)
            weight.master.sent()
            weight.release()


def _put_own_rows(block: ParameterBlock, weight: StreamedParameter) -> None:
    master = weight.master
    if master.store is None or not master.part.numel():
        master.send()
        return
    rows = torch.empty(master.part.shape, dtype=master.part.dtype, device=block.memory.device)
    block.memory.link.reader.read([(master.store.region_of(master.part), rows)]).wait()
    master.device_part.copy_(rows)
