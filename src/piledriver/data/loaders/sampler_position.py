"""Where an order of indices can be entered: a sampler or batch sampler from any position, reading indices only.

Resuming must not read data that was consumed already. A sampler whose order is known in advance (sequential, or a
permutation drawn at the start of the epoch) is entered in one step; any other is walked, which costs its own index
arithmetic and no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import BatchSampler, SequentialSampler


@dataclass(frozen=True, kw_only=True)
class Position:
    """How much of an epoch all processes together have consumed, in batches and in samples of the original order."""

    batches: int = 0
    samples: int = 0


@runtime_checkable
class Enterable(Protocol):
    """A sampler that can hand out its first samples and start at another position, in one draw of its order."""

    def enter(self, start: int, head: int = 0) -> tuple[list[int], Iterator[int]]:
        """The first `head` samples of the order, and the samples from `start` on."""


def enter_samples(sampler: Iterable[int], start: int, head: int = 0) -> tuple[list[int], Iterator[int]]:
    """`Enterable.enter` for any sampler.

    >>> first, rest = enter_samples([7, 8, 9, 10], 2, head=1)
    >>> first, list(rest)
    ([7], [9, 10])
    """
    if isinstance(sampler, Enterable):
        return sampler.enter(start, head)
    if type(sampler) is SequentialSampler:
        length = len(sampler)
        return list(range(min(head, length))), iter(range(start, length))
    walk = iter(sampler)
    first = list(islice(walk, max(head, 0)))
    if start < len(first):
        return first, _chained(first[start:], walk)
    return first, islice(walk, start - len(first), None)


def enter_batches(
    batch_sampler: Iterable[Any], at: Position, head: int = 0
) -> tuple[list[list[int]], Iterator[list[int]]]:
    """The first `head` batches of the order, and the batches from a position on.

    torch's own `BatchSampler` is entered at a sample, so that the position means the same for any batch size; any other
    batch sampler is entered at a batch.
    """
    if type(batch_sampler) is BatchSampler:
        size = batch_sampler.batch_size
        first, rest = enter_samples(batch_sampler.sampler, at.samples, head * size)
        return list(in_batches(first, size)), in_batches(rest, size, drop_last=batch_sampler.drop_last)
    walk = iter(batch_sampler)
    head_batches = [list(batch) for batch in islice(walk, head)]
    if at.batches < len(head_batches):
        return head_batches, _chained([list(batch) for batch in head_batches[at.batches :]], walk)
    return head_batches, islice(walk, at.batches - len(head_batches), None)


def in_batches(samples: Iterable[int], size: int, drop_last: bool = False) -> Iterator[list[int]]:
    """Consecutive lists of `size` samples; the last one may be shorter, or is dropped."""
    walk = iter(samples)
    while batch := list(islice(walk, size)):
        if len(batch) == size or not drop_last:
            yield batch


def _chained(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    yield from first
    yield from rest
