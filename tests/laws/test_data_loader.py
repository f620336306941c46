"""Any torch loader, shared by any number of processes, stopped anywhere: every sample once, in one order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from piledriver.data import prepare_data_loader


class _Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def _rounds(loaders, stop=None):
    """The real samples of all processes, round by round in rank order; the state when stopped after `stop` rounds."""
    iterators = [iter(loader) for loader in loaders]
    order = []
    done = 0
    while stop is None or done < stop:
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            assert all(batch is None for batch in batches)
            return order, None
        for loader, batch in zip(loaders, batches, strict=True):
            order += batch[loader.valid_mask(len(batch))].tolist()
        done += 1
    return order, loaders[-1].state_dict()


def _share(data, world, batch_size, split, shuffle=False):
    per_loader = batch_size * world if split else batch_size
    return [
        prepare_data_loader(
            DataLoader(data, batch_size=per_loader, shuffle=shuffle),
            num_processes=world,
            process_index=rank,
            split_batches=split,
            use_seedable_sampler=shuffle,
            data_seed=11,
        )
        for rank in range(world)
    ]


@given(
    length=st.integers(0, 60),
    world=st.integers(1, 5),
    batch_size=st.integers(1, 4),
    split=st.booleans(),
    iterable=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_sample_once_in_the_order_of_one_process(length, world, batch_size, split, iterable):
    data = _Stream(length) if iterable else range(length)
    order, _ = _rounds(_share(data, world, batch_size, split))
    assert order == list(range(length))


@given(
    length=st.integers(1, 60),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    split=st.booleans(),
    stop=st.integers(0, 10),
)
@settings(max_examples=60, deadline=None)
def test_stopped_anywhere_and_resumed_on_any_world(length, worlds, sizes, split, stop):
    whole, _ = _rounds(_share(range(length), 1, 1, False, shuffle=True))
    before, state = _rounds(_share(range(length), worlds[0], sizes[0], split, shuffle=True), stop)
    assert before == whole[: len(before)]
    if state is None or state["iteration"] == 1:
        assert before == whole
        return
    after_loaders = _share(range(length), worlds[1], sizes[1], split, shuffle=True)
    for loader in after_loaders:
        loader.load_state_dict(state)
    after, _ = _rounds(after_loaders)
    assert before + after == whole
