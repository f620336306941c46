"""Samplers for one process among many: which indices it reads, and which of them are padding.

The arguments are those that users of Hugging Face Accelerate know. Two things are added: a sampler can be entered at
any position (`data.order`), and a shard says how many samples of each batch are real, so that a metric counts every
sample once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, cycle, islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, RandomSampler

from piledriver.data.loaders.sampler_position import Position, enter_batches


class ReplayableRandomSampler(RandomSampler):
    """torch's `RandomSampler`, drawing the same numbers, that remembers what it drew an epoch from.

    With that memory an epoch can be drawn again and entered anywhere: the order is one permutation.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drawn_from: torch.Tensor | int | None = None
        self._draw_again = False

    def __iter__(self) -> Iterator[int]:
        return self.enter(0)[1]

    def enter(self, start: int, head: int = 0) -> tuple[list[int], Iterator[int]]:
        """The first `head` samples of the order, and those from `start` on; draws the epoch's order once."""
        return _split(self._draw(), start, head)

    def state_dict(self, *, finished: bool = False) -> dict[str, Any]:
        """What the current epoch (or, once it is finished, the next one) is drawn from."""
        if finished:
            return {"drawn_from": None if self.generator is None else self.generator.get_state()}
        return {"drawn_from": self._drawn_from}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw the next epoch from what the state names."""
        self._drawn_from = state["drawn_from"]
        self._draw_again = self._drawn_from is not None

    def _draw(self) -> torch.Tensor:
        generator = self.generator
        if generator is None:
            # The same draw from the global generator that torch's sampler makes.
            if not self._draw_again:
                self._drawn_from = int(torch.empty((), dtype=torch.int64).random_().item())
            generator = torch.Generator()
            generator.manual_seed(cast(int, self._drawn_from))
        elif self._draw_again:
            generator.set_state(cast(torch.Tensor, self._drawn_from))
        else:
            self._drawn_from = generator.get_state()
        self._draw_again = False
        return _random_order(self, generator)


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is a function of (seed, epoch), the same on every process.

    >>> sampler = SeedableRandomSampler(range(5), data_seed=3)
    >>> first = list(sampler)
    >>> sampler.set_epoch(0)
    >>> list(sampler) == first
    True
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = data_seed if data_seed is not None else torch.random.initial_seed()
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        return self.enter(0)[1]

    def enter(self, start: int, head: int = 0) -> tuple[list[int], Iterator[int]]:
        """The first `head` samples of the epoch's order, and those from `start` on; the end begins the next epoch."""
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        first, rest = _split(_random_order(self, self.generator), start, head)
        return first, self._to_the_end(rest)

    def _to_the_end(self, rest: Iterator[int]) -> Iterator[int]:
        yield from rest
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of another epoch."""
        self.epoch = epoch


def _random_order(sampler: RandomSampler, generator: torch.Generator) -> torch.Tensor:
    """The draws of torch's `RandomSampler`, number for number, as one tensor."""
    length, wanted = len(cast(Any, sampler.data_source)), sampler.num_samples
    if sampler.replacement:
        sizes = [32] * (wanted // 32) + [wanted % 32]
        return torch.cat([torch.randint(length, (size,), dtype=torch.int64, generator=generator) for size in sizes])
    if length == 0:
        return torch.empty(0, dtype=torch.int64)
    whole = [torch.randperm(length, generator=generator) for _ in range(wanted // length)]
    return torch.cat([*whole, torch.randperm(length, generator=generator)[: wanted % length]])


def _split(order: torch.Tensor, start: int, head: int) -> tuple[list[int], Iterator[int]]:
    # In blocks: entering an order never turns the part that is skipped into Python numbers.
    blocks = (order[at : at + 4096].tolist() for at in range(start, len(order), 4096))
    return order[:head].tolist(), chain.from_iterable(blocks)


class Padding:
    """A note about one iteration, written when its last batch is handed out: only that one can hold padding."""

    valid: int | None = None
    """Real samples at the front of the last batch; None where all are."""


class BatchSamplerShard(BatchSampler):
    """The batches of another batch sampler that one of several processes reads.

    With `split_batches` every batch is cut into one piece per process, otherwise whole batches are dealt out in turn.
    With `even_batches` every process gets the same number of batches of the same size: the last round is filled up with
    samples from the beginning, and `padding` says how many samples at the front of the last batch are real.

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
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.padding = Padding()
        if split_batches and (self.batch_size is None or self.batch_size % num_processes != 0):
            raise ValueError(
                f"with split_batches the batch size ({self.batch_size}) must be a round multiple of the number of "
                f"processes ({num_processes})"
            )

    @property
    def sampler(self) -> Any:
        """The sampler below, where the order of samples comes from."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        cast(Any, self.batch_sampler).sampler = sampler

    @property
    def total_length(self) -> int:
        """Batches of the original batch sampler."""
        return len(cast(Any, self.batch_sampler))

    def __len__(self) -> int:
        if self.split_batches:
            return self.total_length
        rounds, rest = divmod(self.total_length, self.num_processes)
        if self.drop_last or rest == 0:
            return rounds
        return rounds + 1 if self.even_batches else rounds + int(self.process_index < rest)

    def __iter__(self) -> Iterator[list[int]]:
        return self.enter_at(Position())

    def enter_at(self, at: Position) -> Iterator[list[int]]:
        """This process's batches from a position that all processes share."""
        # A fresh note for each iteration: the loader that asked keeps its own, however far ahead its workers read.
        self.padding = Padding()
        return self._shards(at, self.padding)

    def _shards(self, at: Position, padding: Padding) -> Iterator[list[int]]:
        batches_per_round = 1 if self.split_batches else self.num_processes
        first, batches = enter_batches(self.batch_sampler, at, head=batches_per_round)
        ahead = list(islice(batches, batches_per_round))
        while ahead:
            this_round, ahead = ahead, list(islice(batches, batches_per_round))
            complete = len(this_round) == batches_per_round and len(this_round[-1]) == (
                self.batch_size if self.batch_size is not None else len(this_round[-1])
            )
            if complete or ahead:
                yield self._mine(this_round)
            elif self.drop_last:
                return
            elif self.even_batches:
                mine, padding.valid = self._filled(this_round, first)
                yield mine
            elif mine := self._mine(this_round):
                yield mine

    def _mine(self, batches: list[list[int]]) -> list[int]:
        """This process's part of one round."""
        if self.split_batches:
            width = cast(int, self.batch_size) // self.num_processes
            return batches[0][width * self.process_index : width * (self.process_index + 1)]
        return batches[self.process_index] if self.process_index < len(batches) else []

    def _filled(self, batches: list[list[int]], first: list[list[int]]) -> tuple[list[int], int]:
        """This process's part of the last, incomplete round, filled up from the beginning, and how much is real."""
        if self.batch_size is None:
            # Batches of any size are whole things (a bucket, a token budget): fill up with whole batches.
            filler = islice(cycle(first), self.num_processes)
            mine = [*batches, *filler][self.process_index]
            return mine, len(mine) if self.process_index < len(batches) else 0
        if not self.split_batches and any(len(batch) != self.batch_size for batch in batches[:-1]):
            # A custom sampler broke its own batch size before the end: keep its batches apart.
            mine, valid = list(self._mine(batches)), len(self._mine(batches))
            return [*mine, *islice(cycle(chain.from_iterable(first)), max(0, self.batch_size - valid))], valid
        samples = list(chain.from_iterable(batches))
        width = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        start = width * self.process_index
        filled = [*samples, *islice(cycle(chain.from_iterable(first)), width * self.num_processes)]
        return filled[start : start + width], max(0, min(width, len(samples) - start))


class SkipBatchSampler(BatchSampler):
    """Another batch sampler without its first batches, which are not read.

    >>> list(SkipBatchSampler(BatchSampler(range(6), batch_size=2, drop_last=False), skip_batches=2))
    [[4, 5]]
    """

    def __init__(self, batch_sampler: BatchSampler | Iterable[list[int]], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __iter__(self) -> Iterator[list[int]]:
        return batches_from(self.batch_sampler, self.skip_batches)

    def __len__(self) -> int:
        return self.total_length - self.skip_batches

    @property
    def sampler(self) -> Any:
        """The sampler below, where the order of samples comes from."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        cast(Any, self.batch_sampler).sampler = sampler

    @property
    def total_length(self) -> int:
        """Batches of the original batch sampler."""
        return len(cast(Any, self.batch_sampler))

    @property
    def padding(self) -> Padding | None:
        """What the original says about padding."""
        return cast("Padding | None", getattr(self.batch_sampler, "padding", None))


class RemainingBatches(BatchSampler):
    """What is left of an epoch from a position that all processes share."""

    def __init__(self, batch_sampler: BatchSampler | Iterable[list[int]], at: Position) -> None:
        # A position counts from the start of the epoch, so what was skipped before is in it already.
        while isinstance(batch_sampler, SkipBatchSampler):
            batch_sampler = batch_sampler.batch_sampler
        self.batch_sampler = batch_sampler
        self.at = at

    def __iter__(self) -> Iterator[list[int]]:
        if isinstance(self.batch_sampler, BatchSamplerShard):
            return self.batch_sampler.enter_at(self.at)
        return self._lazily()

    def _lazily(self) -> Iterator[list[int]]:
        # torch's batch sampler draws its order at the first batch, after the loader has drawn from the same generator.
        yield from enter_batches(self.batch_sampler, self.at)[1]

    @property
    def padding(self) -> Padding | None:
        """What the original says about padding."""
        return cast("Padding | None", getattr(self.batch_sampler, "padding", None))


def batches_from(batch_sampler: BatchSampler | Iterable[list[int]], skip: int) -> Iterator[list[int]]:
    """A process's batches after its first `skip` ones."""
    return iter(RemainingBatches(batch_sampler, position_after(batch_sampler, skip)))


def position_after(batch_sampler: Any, batches: int) -> Position:
    """The shared position when every process has taken so many batches from the start of the sampler."""
    while isinstance(batch_sampler, SkipBatchSampler):
        batches += batch_sampler.skip_batches
        batch_sampler = batch_sampler.batch_sampler
    if isinstance(batch_sampler, BatchSamplerShard) and not batch_sampler.split_batches:
        batches *= batch_sampler.num_processes
    return Position(batches=batches, samples=batches * (getattr(batch_sampler, "batch_size", None) or 0))


class Unbatched(BatchSampler):
    """Single indices from batches of one, for a loader that does not batch (`batch_size=None`).

    It counts as a batch sampler, so that padding, position and epoch are found where those of batches are.
    """

    def __init__(self, batch_sampler: BatchSampler | Iterable[list[int]]) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batch_sampler)
        return (index for (index,) in batches)

    def __len__(self) -> int:
        return len(cast(Any, self.batch_sampler))

    @property
    def padding(self) -> Padding | None:
        """What the batches below say about padding."""
        return cast("Padding | None", getattr(self.batch_sampler, "padding", None))
