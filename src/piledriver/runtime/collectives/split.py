"""Split a list, a tensor or a dictionary of them between ranks: slicing, without communication."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from piledriver.runtime.errors import WorldError
from piledriver.runtime.world import World


@contextmanager
def split_between_processes(world: World, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
    """Yield this rank's part; the first ranks get one item more if it does not divide.

    With `apply_padding` shorter parts repeat their last item, so that results can be gathered.

    >>> with split_between_processes(World(rank=1, size=2, local_rank=1, local_size=2), ["a", "b", "c"]) as mine:
    ...     mine
    ['c']
    """
    yield shard_inputs(inputs, world.rank, world.size, apply_padding)


def shard_inputs(inputs: Any, rank: int, size: int, apply_padding: bool = False) -> Any:
    """Return one rank's part of the inputs.

    >>> [shard_inputs([0, 1, 2], rank, 2, apply_padding=True) for rank in (0, 1)]
    [[0, 1], [2, 2]]
    """
    if size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise WorldError(f"the values have different lengths: {lengths}", fix="split them one at a time")
        return type(inputs)((k, shard_inputs(v, rank, size, apply_padding)) for k, v in inputs.items())  # type: ignore[call-arg]
    start, end = shard_bounds(len(inputs), rank, size)
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):
        # Slicing a Hugging Face dataset would return a dictionary of lists.
        longest = -(-len(inputs) // size)
        rows = [*range(start, end), *([len(inputs) - 1] * (longest - (end - start)) if apply_padding else [])]
        return inputs.select(rows)
    share = inputs[start:end]
    if not apply_padding:
        return share
    longest = -(-len(inputs) // size)
    return _pad(share, inputs, longest - (end - start))


def shard_bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first index of a rank's part and the index after its last.

    >>> [shard_bounds(5, rank, 3) for rank in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    each, extra = divmod(length, size)
    start = rank * each + min(rank, extra)
    return start, start + each + (rank < extra)


def _pad(share: Any, inputs: Any, missing: int) -> Any:
    if missing <= 0 or len(inputs) == 0:
        return share
    last = inputs[-1:] if len(share) == 0 else share[-1:]
    if isinstance(share, torch.Tensor):
        return torch.cat([share, last.repeat(missing, *[1] * (share.ndim - 1))])
    if isinstance(share, (list, tuple, str)):
        return share + last * missing
    raise WorldError(
        f"cannot pad a {type(share).__name__}", fix="pass a list, a tuple, a tensor or a dictionary of them"
    )
