"""torch's private API that this room uses, so that a torch upgrade is one file."""

from __future__ import annotations

from torch.utils.data import RandomSampler


def requested_samples(sampler: RandomSampler) -> int | None:
    """Return the `num_samples` that a sampler was given; its public property replaces None by the data's length."""
    return sampler._num_samples
