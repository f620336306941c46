"""The dispatcher over real processes: one reads, all get their part, and every sample counts once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from piledriver.data import prepare_data_loader
from tests.checkpoint.processes import run as on_ranks


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        for i in range(self.length):
            yield {"x": torch.tensor([i]), "name": f"s{i}"}


def _read(length: int, batch_size: int, split: bool):
    loader = prepare_data_loader(
        DataLoader(Stream(length), batch_size=batch_size), device="cpu", put_on_device=True, split_batches=split
    )
    rounds = []
    for batch in loader:
        parts = [None] * dist.get_world_size()
        x = batch["x"]
        dist.all_gather_object(parts, (x[loader.valid_mask(len(x))].flatten().tolist(), len(x)))
        rounds.append(parts)
    assert loader.end_of_dataloader == (length > 0)
    return rounds


def _shuffled_ranks_agree():
    torch.manual_seed(dist.get_rank())  # ranks that were seeded differently still share one order
    loader = prepare_data_loader(DataLoader(range(10), batch_size=2, shuffle=True), rng_types=["generator"])
    mine = [x for batch in loader for x in batch[loader.valid_mask(len(batch))].tolist()]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert sorted(x for part in everyone for x in part) == list(range(10))


def _resumed_dispatch_reads_nothing_twice():
    def make():
        torch.manual_seed(7)
        return prepare_data_loader(
            DataLoader(torch.arange(20), batch_size=2, shuffle=True),
            device="cpu",
            put_on_device=True,
            dispatch_batches=True,
        )

    loader = make()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    assert all(one == state for one in states), "any process may save it"
    rest = [batch[loader.valid_mask(len(batch))].tolist() for batch in batches]
    again = make()
    torch.manual_seed(99)  # the order comes from the state, not from what the generator is at now
    again.load_state_dict(state)
    assert [batch[again.valid_mask(len(batch))].tolist() for batch in again] == rest


def _process(rank: int) -> None:
    for length, batch_size, split in [(7, 2, False), (12, 2, False), (7, 6, True), (1, 3, True), (0, 2, False)]:
        rounds = _read(length, batch_size, split)
        assert [x for parts in rounds for seen, _ in parts for x in seen] == list(range(length))
        assert all(len({size for _, size in parts}) == 1 for parts in rounds), "every rank gets as much"
    _shuffled_ranks_agree()
    _resumed_dispatch_reads_nothing_twice()


@pytest.mark.slow
def test_dispatched_parts_make_up_the_stream():
    on_ranks(3, _process)
