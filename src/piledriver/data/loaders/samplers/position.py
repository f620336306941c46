"""Positions in an order of samples: start a sampler or batch sampler anywhere, reading indices only.

Resuming must not read data that was consumed already. A sampler whose order is known in advance (sequential, or a
permutation drawn at the start of the epoch) starts at a position directly; any other is iterated up to it, which costs
index arithmetic and no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import BatchSampler, SequentialSampler


@dataclass(frozen=True, kw_only=True)
class SamplerPosition:
    """How much of an epoch all ranks together have consumed, in batches and in samples of the original order."""

    batches: int = 0
    samples: int = 0


@runtime_checkable
class SeekableSampler(Protocol):
    """A sampler that returns its first samples and those from a position on, in one draw of its order."""

    def seek(self, start: int, head: int = 0) -> tuple[list[int], Iterator[int]]:
        """Return the first `head` samples of the order, and the samples from `start` on."""


def seek_samples(sampler: Iterable[int], start: int, head: int = 0) -> tuple[list[int], Iterator[int]]:
    """Return the first `head` samples of any sampler, and those from `start` on.

    >>> first, rest = seek_samples([7, 8, 9, 10], 2, head=1)
    >>> first, list(rest)
    ([7], [9, 10])
    """
    if isinstance(sampler, SeekableSampler):
        return sampler.seek(start, head)
    if type(sampler) is SequentialSampler:
        length = len(sampler)
        return list(range(min(head, length))), iter(range(start, length))
    walk = iter(sampler)
    first = list(islice(walk, max(head, 0)))
    return first, chain(first[start:], islice(walk, max(0, start - len(first)), None))


def seek_batches(
    batch_sampler: Iterable[Any], at: SamplerPosition, head: int = 0
) -> tuple[list[list[int]], Iterator[list[int]]]:
    """Return the first `head` batches of the order, and the batches from a position on.

    torch's own `BatchSampler` starts at a sample, so that the position means the same for any batch size; any other
    batch sampler starts at a batch.
    """
    if type(batch_sampler) is BatchSampler:
        size = batch_sampler.batch_size
        first, rest = seek_samples(batch_sampler.sampler, at.samples, head * size)
        return list(in_batches(first, size)), in_batches(rest, size, drop_last=batch_sampler.drop_last)
    walk = iter(batch_sampler)
    head_batches = [list(batch) for batch in islice(walk, head)]
    again = [list(batch) for batch in head_batches[at.batches :]]
    return head_batches, chain(again, islice(walk, max(0, at.batches - len(head_batches)), None))


def in_batches(samples: Iterable[int], size: int, drop_last: bool = False) -> Iterator[list[int]]:
    """Yield consecutive lists of `size` samples; the last one may be shorter, or is dropped."""
    walk = iter(samples)
    while batch := list(islice(walk, size)):
        if len(batch) == size or not drop_last:
            yield batch
