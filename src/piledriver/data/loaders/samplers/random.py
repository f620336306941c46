"""Random samplers whose order can be drawn again and entered at any position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch.utils.data import RandomSampler

from piledriver.data.torch_private import requested_samples


class ReplayableRandomSampler(RandomSampler):
    """torch's `RandomSampler`, with the same draws, that remembers the generator state of the current epoch.

    From that state an epoch's order, which is one permutation, can be drawn again after a resume.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drawn_from: torch.Tensor | int | None = None
        self._draw_again = False

    def __iter__(self) -> Iterator[int]:
        return self.seek(0)[1]

    def seek(self, start: int, head: int = 0) -> tuple[list[int], Iterator[int]]:
        """Return the first `head` samples of the order, and those from `start` on; draws the epoch's order."""
        return _split(self._draw(), start, head)

    def state_dict(self, *, finished: bool = False) -> dict[str, Any]:
        """Return what the current epoch (or, if it is finished, the next one) is drawn from."""
        if finished:
            return {"drawn_from": None if self.generator is None else self.generator.get_state()}
        return {"drawn_from": self._drawn_from}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw the next epoch from a saved state."""
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
    """A random sampler whose order is a function of (seed, epoch), the same on every rank.

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
        return self.seek(0)[1]

    def seek(self, start: int, head: int = 0) -> tuple[list[int], Iterator[int]]:
        """Return the first `head` samples of the epoch's order, and those from `start` on, then the next epoch."""
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        first, rest = _split(_random_order(self, self.generator), start, head)
        return first, self._finish_epoch(rest)

    def _finish_epoch(self, rest: Iterator[int]) -> Iterator[int]:
        yield from rest
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is drawn next."""
        self.epoch = epoch


def copy_random_sampler(
    sampler: RandomSampler, *, seedable: bool, data_seed: int | None, generator: torch.Generator | None
) -> ReplayableRandomSampler | SeedableRandomSampler:
    """Return a sampler with the settings of torch's, whose order can be drawn again."""
    settings = {
        "data_source": sampler.data_source,
        "replacement": sampler.replacement,
        "num_samples": requested_samples(sampler),
        "generator": generator,
    }
    return SeedableRandomSampler(**settings, data_seed=data_seed) if seedable else ReplayableRandomSampler(**settings)


def _random_order(sampler: RandomSampler, generator: torch.Generator) -> torch.Tensor:
    """Return the draws of torch's `RandomSampler`, number for number, as one tensor."""
    length, wanted = len(cast(Any, sampler.data_source)), sampler.num_samples
    if sampler.replacement:
        sizes = [32] * (wanted // 32) + [wanted % 32]
        return torch.cat([torch.randint(length, (size,), dtype=torch.int64, generator=generator) for size in sizes])
    if length == 0:
        return torch.empty(0, dtype=torch.int64)
    full = [torch.randperm(length, generator=generator) for _ in range(wanted // length)]
    return torch.cat([*full, torch.randperm(length, generator=generator)[: wanted % length]])


def _split(order: torch.Tensor, start: int, head: int) -> tuple[list[int], Iterator[int]]:
    # In blocks: samples before `start` never become Python integers.
    blocks = (order[at : at + 4096].tolist() for at in range(start, len(order), 4096))
    return order[:head].tolist(), chain.from_iterable(blocks)
