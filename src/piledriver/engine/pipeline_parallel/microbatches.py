"""Split a batch into micro-batches of one shape, since torch's stages receive into buffers of a fixed size.

Shorter micro-batches are padded with copies of a row, whose outputs and targets are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.kernels.cross_entropy import IGNORE_INDEX


@dataclass(frozen=True)
class MicroBatch:
    """One part of a batch."""

    inputs: tuple[Tensor, ...]
    """Inputs of the first stage."""
    context: dict[str, Any]
    """Keyword arguments of every stage."""
    targets: Any
    """Targets of the real rows."""
    rows: int
    """Number of real rows; those after them are padding."""

    @property
    def filled(self) -> int:
        """Number of rows, padding included."""
        return int(self.inputs[0].shape[0])

    def padded_targets(self) -> Tensor:
        """Return targets for every row; those of the padding are ignored."""
        missing = self.filled - self.rows
        if not missing:
            return self.targets  # type: ignore[no-any-return]
        return torch.cat((self.targets, self.targets.new_full((missing, *self.targets.shape[1:]), IGNORE_INDEX)))


def split_microbatches(
    inputs: Tensor | tuple[Tensor, ...], targets: Any, context: Mapping[str, Any], parts: int
) -> list[MicroBatch]:
    """Split tensors along their first dimension, as evenly as possible.

    >>> [part.rows for part in split_microbatches(torch.zeros(7, 2), torch.zeros(7), {}, 4)]
    [2, 2, 2, 1]
    """
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    rows = given[0].shape[0]
    whole = [*given, *_tensors(targets), *(value for value in context.values() if isinstance(value, Tensor))]
    lengths = {tensor.shape[0] for tensor in whole}
    if lengths != {rows} or rows == 0:
        raise UsageError(f"the tensors of a batch have {sorted(lengths)} rows", fix="give all the same, 1 or more")
    most = -(-rows // parts)
    cut: list[MicroBatch] = []
    begin = 0
    for part in range(parts):
        count = rows // parts + (part < rows % parts)
        # Padding repeats the first row: valid values for every operator.
        index = torch.tensor([*range(begin, begin + count), *[0] * (most - count)])

        def take(value: Any, index: Tensor = index, begin: int = begin, count: int = count) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value[begin : begin + count] if count == most else value[index.to(value.device)]

        cut.append(
            MicroBatch(
                tuple(take(tensor) for tensor in given),
                {name: take(value) for name, value in context.items()},
                _sliced(targets, slice(begin, begin + count)),
                count,
            )
        )
        begin += count
    return cut


def count_targets(targets: Any) -> int | Tensor:
    """Return the number of targets of a micro-batch: integers that are not -100, or rows."""
    tensors = _tensors(targets)
    if tensors and not tensors[0].is_floating_point() and tensors[0].dtype != torch.bool:
        return (tensors[0] != IGNORE_INDEX).sum()
    return tensors[0].shape[0] if tensors else 0


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for member in members for tensor in _tensors(member)]


def _sliced(value: Any, rows: slice) -> Any:
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, Mapping):
        return {name: _sliced(member, rows) for name, member in value.items()}
    return type(value)(_sliced(member, rows) for member in value) if isinstance(value, list | tuple) else value
