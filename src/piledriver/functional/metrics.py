"""Metrics as trees: `from_batch` makes one, `merge` joins any two, `compute` returns the result.

Merging is associative, so batches and ranks can be joined in any order (`partitioning.merge_processes`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.functional.errors import TreeStructureError
from piledriver.functional.struct import tree_dataclass
from piledriver.functional.tree import Tree

A = TypeVar("A")


@tree_dataclass
class Average:
    """A weighted mean.

    >>> merged = Average.from_batch(torch.tensor([1.0, 2.0])).merge(Average.from_batch(torch.tensor([6.0])))
    >>> merged.compute()
    tensor(3.)
    """

    total: Tensor
    weight: Tensor

    @classmethod
    def from_batch(cls, values: Tensor, mask: Tensor | None = None) -> Self:
        """Return the metric of one batch of numbers; `mask` weighs them."""
        values = values.float()
        weights = torch.ones_like(values) if mask is None else mask.float().expand_as(values)
        return cls(total=(values * weights).sum(), weight=weights.sum())

    def merge(self, other: Self) -> Self:
        return type(self)(total=self.total + other.total, weight=self.weight + other.weight)

    def compute(self) -> Tensor:
        return self.total / self.weight


@tree_dataclass
class Accuracy(Average):
    """The fraction of predictions whose largest logit is the label."""

    @classmethod
    def from_batch(cls, logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Self:  # type: ignore[override]
        """Return the metric of one batch; `mask` weighs the predictions."""
        return super().from_batch(logits.argmax(dim=-1) == labels, mask)


@tree_dataclass
class Welford:
    """Mean and variance without cancellation (Chan et al., 1983)."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def from_batch(cls, values: Tensor) -> Welford:
        values = values.float().flatten()
        mean = values.sum() / max(len(values), 1)
        return cls(count=mean.new_full((), len(values)), mean=mean, squares=(values - mean).square().sum())

    def merge(self, other: Welford) -> Welford:
        count = self.count + other.count
        share = other.count / count.clamp(min=1.0)  # an empty batch, such as a rank's last one, changes nothing
        delta = other.mean - self.mean
        squares = self.squares + other.squares + delta.square() * self.count * share
        return Welford(count=count, mean=self.mean + delta * share, squares=squares)

    def compute(self) -> dict[str, Tensor]:
        """Return the mean, the standard deviation and the standard error of the mean."""
        deviation = (self.squares / self.count).sqrt()
        return {"mean": self.mean, "std": deviation, "sem": deviation / self.count.sqrt()}


@tree_dataclass
class Metrics:
    """Several metrics by name."""

    parts: Tree

    @classmethod
    def from_batch(cls, **parts: Any) -> Metrics:
        return cls(parts=Tree(parts))

    def merge(self, other: Metrics) -> Metrics:
        """Return each metric merged with the one of the same name."""
        if self.parts.keys() != other.parts.keys():
            raise TreeStructureError(
                f"metrics {', '.join(self.parts)} with metrics {', '.join(other.parts)}",
                fix="make the same ones of every batch",
            )
        return Metrics(parts=Tree({name: part.merge(other.parts[name]) for name, part in self.parts.items()}))

    def compute(self) -> Mapping[str, Any]:
        return {name: part.compute() for name, part in self.parts.items()}


def merge_all(metrics: Iterable[A]) -> A:
    """Return any number of metrics of one kind merged; at least one."""
    found = list(metrics)
    if not found:
        raise UsageError("no metrics to merge", fix="check that there was a batch")
    return functools.reduce(lambda a, b: a.merge(b), found)  # type: ignore[attr-defined]
