"""Batch samplers of one rank: which indices it reads, and which of them are padding.

The arguments are those of Hugging Face Accelerate. Two things are added: iteration can start at any position
(`position.py`), and a shard counts the real samples of a padded batch, so that a metric counts every sample once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any, cast

from torch.utils.data import BatchSampler

from piledriver.data.loaders.samplers.position import SamplerPosition, seek_batches


class Padding:
    """Padding of one iteration, set when its last batch is drawn: only that batch can be padded."""

    valid: int | None = None
    """Real samples at the front of the last batch; None if all are."""


class _BatchSamplerOver(BatchSampler):
    """A batch sampler over another one, with its sampler and batch size."""

    def __init__(self, batch_sampler: BatchSampler | Iterable[list[int]]) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def sampler(self) -> Any:
        """The sampler that the order of samples comes from."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        cast(Any, self.batch_sampler).sampler = sampler

    @property
    def total_length(self) -> int:
        """Batches of the original batch sampler."""
        return len(cast(Any, self.batch_sampler))


class BatchSamplerShard(_BatchSamplerOver):
    """The batches of another batch sampler that one rank reads.

    With `split_batches` every batch is split between ranks, otherwise full batches are assigned in turn. With
    `even_batches` every rank gets the same number of batches of the same size: the last round is padded with samples
    from the start, and `padding` counts the real samples of the last batch.

    >>> batches = BatchSampler(range(5), batch_size=2, drop_last=False)
    >>> list(BatchSamplerShard(batches, num_processes=2, process_index=1))
    [[2, 3], [1, 2]]
    """

    def __init__(
        self,
        batch_sampler: BatchSampler | Iterable[list[int]],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        super().__init__(batch_sampler)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.padding = Padding()
        if split_batches and (self.batch_size is None or self.batch_size % num_processes != 0):
            raise ValueError(
                f"with split_batches the batch size ({self.batch_size}) must be a round multiple of the number of "
                f"processes ({num_processes})"
            )

    def __len__(self) -> int:
        if self.split_batches:
            return self.total_length
        rounds, rest = divmod(self.total_length, self.num_processes)
        if self.drop_last or rest == 0:
            return rounds
        return rounds + 1 if self.even_batches else rounds + int(self.process_index < rest)

    def __iter__(self) -> Iterator[list[int]]:
        return self.seek(SamplerPosition())

    def seek(self, at: SamplerPosition) -> Iterator[list[int]]:
        """Return this rank's batches from a position that all ranks share."""
        # A new object for each iteration: its loader keeps it, however far ahead its workers read.
        self.padding = Padding()
        return self._shards(at, self.padding)

    def _shards(self, at: SamplerPosition, padding: Padding) -> Iterator[list[int]]:
        batches_per_round = 1 if self.split_batches else self.num_processes
        first, batches = seek_batches(self.batch_sampler, at, head=batches_per_round)
        ahead = list(islice(batches, batches_per_round))
        while ahead:
            this_round, ahead = ahead, list(islice(batches, batches_per_round))
            complete = len(this_round) == batches_per_round and len(this_round[-1]) == (
                self.batch_size if self.batch_size is not None else len(this_round[-1])
            )
            if complete or ahead:
                yield self._own_part(this_round)
            elif self.drop_last:
                return
            elif self.even_batches:
                own, padding.valid = self._padded(this_round, first)
                yield own
            elif own := self._own_part(this_round):
                yield own

    def _own_part(self, batches: list[list[int]]) -> list[int]:
        """Return this rank's part of one round."""
        if self.split_batches:
            width = cast(int, self.batch_size) // self.num_processes
            return batches[0][width * self.process_index : width * (self.process_index + 1)]
        return batches[self.process_index] if self.process_index < len(batches) else []

    def _padded(self, batches: list[list[int]], first: list[list[int]]) -> tuple[list[int], int]:
        """Return this rank's part of the incomplete last round, padded from the start, and its real samples."""
        if self.batch_size is None:
            # Batches of any size (a bucket, a token budget) stay as they are: pad with complete batches.
            filler = islice(cycle(first), self.num_processes)
            own = [*batches, *filler][self.process_index]
            return own, len(own) if self.process_index < len(batches) else 0
        if not self.split_batches and any(len(batch) != self.batch_size for batch in batches[:-1]):
            # A custom sampler yielded a short batch before the end: do not join its batches.
            own, valid = list(self._own_part(batches)), len(self._own_part(batches))
            return [*own, *islice(cycle(chain.from_iterable(first)), max(0, self.batch_size - valid))], valid
        samples = list(chain.from_iterable(batches))
        width = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        start = width * self.process_index
        filled = [*samples, *islice(cycle(chain.from_iterable(first)), width * self.num_processes)]
        return filled[start : start + width], max(0, min(width, len(samples) - start))


class SkipBatchSampler(_BatchSamplerOver):
    """Another batch sampler without its first batches, which are not read.

    >>> list(SkipBatchSampler(BatchSampler(range(6), batch_size=2, drop_last=False), skip_batches=2))
    [[4, 5]]
    """

    def __init__(self, batch_sampler: BatchSampler | Iterable[list[int]], skip_batches: int = 0) -> None:
        super().__init__(batch_sampler)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(RemainingBatches(self.batch_sampler, position_after(self.batch_sampler, self.skip_batches)))

    def __len__(self) -> int:
        return self.total_length - self.skip_batches


class RemainingBatches(BatchSampler):
    """The rest of an epoch from a position that all ranks share."""

    def __init__(self, batch_sampler: BatchSampler | Iterable[list[int]], at: SamplerPosition) -> None:
        # A position counts from the start of the epoch and so includes what was skipped before.
        while isinstance(batch_sampler, SkipBatchSampler):
            batch_sampler = batch_sampler.batch_sampler
        self.batch_sampler = batch_sampler
        self.at = at

    def __iter__(self) -> Iterator[list[int]]:
        if isinstance(self.batch_sampler, BatchSamplerShard):
            return self.batch_sampler.seek(self.at)
        return self._lazily()

    def _lazily(self) -> Iterator[list[int]]:
        # torch's batch sampler draws its order at the first batch, after the loader has drawn from the same generator.
        yield from seek_batches(self.batch_sampler, self.at)[1]


class Unbatched(BatchSampler):
    """Single indices from batches of one, for a loader that does not batch (`batch_size=None`).

    It is a batch sampler, so that padding, position and epoch are handled as for batches.
    """

    def __init__(self, batch_sampler: BatchSampler | Iterable[list[int]]) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batch_sampler)
        return (index for (index,) in batches)

    def __len__(self) -> int:
        return len(cast(Any, self.batch_sampler))


def padding_of(batch_sampler: Any) -> Padding | None:
    """Return the padding of the shard that a batch sampler is, or is over; None without one."""
    while batch_sampler is not None and not isinstance(batch_sampler, BatchSamplerShard):
        batch_sampler = getattr(batch_sampler, "batch_sampler", None)
    return None if batch_sampler is None else batch_sampler.padding


def position_after(batch_sampler: Any, batches: int) -> SamplerPosition:
    """Return the shared position after every rank has read so many batches from the start of the sampler."""
    while isinstance(batch_sampler, SkipBatchSampler):
        batches += batch_sampler.skip_batches
        batch_sampler = batch_sampler.batch_sampler
    if isinstance(batch_sampler, BatchSamplerShard) and not batch_sampler.split_batches:
        batches *= batch_sampler.num_processes
    return SamplerPosition(batches=batches, samples=batches * (getattr(batch_sampler, "batch_size", None) or 0))
