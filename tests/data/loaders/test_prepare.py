"""`prepare_data_loader` does what users of Accelerate expect of it, and says which samples are padding."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from piledriver.data import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from piledriver.data.loaders.samplers.random import ReplayableRandomSampler


class Counting(Dataset):
    """Remembers what was read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class StatefulStream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length, self.at, self.read = length, 0, 0

    def __iter__(self):
        start, self.at = self.at, 0
        for i in range(start, self.length):
            self.at = i + 1
            self.read += 1
            yield i
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def shares(make_loader, count, **options):
    return [prepare_data_loader(make_loader(), num_processes=count, process_index=i, **options) for i in range(count)]


def real(loader) -> list[list[int]]:
    """Each batch without its padding."""
    return [batch[loader.valid_mask(len(batch))].tolist() for batch in loader]


def test_padded_ends_follow_accelerate():
    batches = BatchSampler(range(20), batch_size=3, drop_last=False)
    assert [list(BatchSamplerShard(batches, 2, i))[-1] for i in (0, 1)] == [[18, 19, 0], [1, 2, 3]]
    tiny = BatchSampler(range(2), batch_size=3, drop_last=False)
    assert [list(BatchSamplerShard(tiny, 2, i)) for i in (0, 1)] == [[[0, 1, 0]], [[1, 0, 1]]]
    split = BatchSampler(range(21), batch_size=4, drop_last=False)
    assert [list(BatchSamplerShard(split, 2, i, split_batches=True))[-1] for i in (0, 1)] == [[20, 0], [1, 2]]
    buckets = [[0, 1, 2], [3, 4], [5]]
    assert [list(BatchSamplerShard(buckets, 2, i)) for i in (0, 1)] == [[[0, 1, 2], [5]], [[3, 4], [0, 1, 2]]]


def test_uneven_ends_stay_uneven_where_asked():
    batches = BatchSampler(range(22), batch_size=3, drop_last=False)
    last = [list(BatchSamplerShard(batches, 2, i, even_batches=False))[-1] for i in (0, 1)]
    assert last == [[18, 19, 20], [21]]


@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Counting, Stream])
def test_mask_counts_each_sample_once(kind, workers):
    if kind is Stream and workers:
        length, workers = 7, 1  # torch gives every worker of a plain stream all of it; one shows the crossing
    else:
        length = 7
    loaders = shares(lambda: DataLoader(kind(length), batch_size=2, num_workers=workers), 3)
    seen = [real(loader) for loader in loaders]
    assert [len(batches) for batches in seen] == [2, 2, 2]
    assert sorted(sample for batches in seen for batch in batches for sample in batch) == list(range(7))


def test_dataset_smaller_than_the_world():
    loaders = shares(lambda: DataLoader([5, 6], batch_size=1), 4)
    assert [real(loader) for loader in loaders] == [[[5]], [[6]], [[]], [[]]]


def test_seedable_order_is_the_same_everywhere_and_new_each_epoch():
    loaders = shares(
        lambda: DataLoader(range(12), batch_size=3, shuffle=True), 2, use_seedable_sampler=True, data_seed=5
    )
    epochs = [sorted(x for loader in loaders for batch in real(loader) for x in batch) for _ in range(2)]
    assert epochs == [list(range(12))] * 2
    first, second = ([batch.tolist() for batch in loaders[0]] for _ in range(2))
    assert first != second
    loaders[0].set_epoch(2)
    assert [batch.tolist() for batch in loaders[0]] == first


def test_random_samplers_draw_what_torch_draws():
    for replacement, samples in ((False, None), (True, 40), (False, 25)):
        ours, theirs = (
            kind(range(10), replacement, samples, torch.Generator().manual_seed(3))
            for kind in (ReplayableRandomSampler, RandomSampler)
        )
        assert [list(ours), list(ours)] == [list(theirs), list(theirs)]


@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_resume_reads_nothing_twice(seedable, world):
    data = Counting(20)

    def make():
        return prepare_data_loader(
            DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1)),
            num_processes=world,
            process_index=world - 1,
            use_seedable_sampler=seedable,
            data_seed=1,
        )

    loader = make()
    list(loader)
    second = []
    state = {}
    for i, batch in enumerate(loader):
        second.append(batch.tolist())
        if i == 2:
            state = pickle.loads(pickle.dumps(loader.state_dict()))
    third = [batch.tolist() for batch in loader]
    data.read.clear()
    again = make()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == second[3:]
    assert sorted(data.read) == sorted(x for batch in second[3:] for x in batch)
    assert [batch.tolist() for batch in again] == third


def test_state_after_the_last_batch_is_the_next_epoch():
    def make():
        return prepare_data_loader(DataLoader(range(6), batch_size=2, shuffle=True), use_seedable_sampler=True)

    loader = make()
    inside = [loader.state_dict() for _ in loader][-1]
    after = loader.state_dict()
    following = [batch.tolist() for batch in loader]
    for state in (inside, after):
        again = make()
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again] == following


def test_state_moves_to_another_number_of_processes():
    def worlds(count, size):
        return shares(lambda: DataLoader(range(24), batch_size=size), count)

    states = []
    for loader in worlds(2, 3):
        batches = iter(loader)
        next(batches)
        states.append(loader.state_dict())
    assert states[0] == states[1]
    rest = []
    for loader in worlds(4, 2):
        loader.load_state_dict(states[0])
        rest.append(real(loader))
    assert sorted(x for batches in rest for batch in batches for x in batch) == list(range(6, 24))


def test_custom_batch_sampler_resumes_by_batches():
    buckets = [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9], [10, 11]]
    loader = prepare_data_loader(DataLoader(Counting(12), batch_sampler=buckets), num_processes=2, process_index=0)
    batches = iter(loader)
    next(batches)
    again = prepare_data_loader(DataLoader(Counting(12), batch_sampler=buckets), num_processes=2, process_index=0)
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [[5, 6, 7, 8], [10, 11]]


def test_stateful_stream_resumes_without_reading_again():
    loader = prepare_data_loader(DataLoader(StatefulStream(12), batch_size=2), num_processes=2, process_index=1)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    source = StatefulStream(12)
    again = prepare_data_loader(DataLoader(source, batch_size=2), num_processes=2, process_index=1)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [[6, 7], [10, 11]]
    assert source.read == 8


def test_plain_stream_resumes_by_reading_up_to_there():
    loader = prepare_data_loader(DataLoader(Stream(10), batch_size=2))
    batches = iter(loader)
    next(batches)
    again = prepare_data_loader(DataLoader(Stream(10), batch_size=2))
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.filterwarnings("ignore:os.fork", "ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_torchdata_state_with_workers(kind):
    pytest.importorskip("torchdata")
    options = {"batch_size": 4, "use_stateful_dataloader": True, "num_workers": 1}
    loader = kind(list(range(16)), **options)
    values = []
    state = {}
    for i, batch in enumerate(loader):
        values.append(batch.tolist())
        if i == 1:
            state = loader.state_dict()
    again = kind(list(range(16)), **options)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == values[2:]


def test_skipping_reads_nothing_that_is_skipped():
    data = Counting(16)
    assert [b.tolist() for b in skip_first_batches(DataLoader(data, batch_size=4), 2)] == [
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert data.read == list(range(8, 16))
    data.read.clear()
    assert [b.tolist() for b in SkipDataLoader(data, batch_size=4, skip_batches=3)] == [[12, 13, 14, 15]]
    assert data.read == list(range(12, 16))
    prepared = prepare_data_loader(DataLoader(data, batch_size=2), num_processes=2, process_index=1)
    skipped = skip_first_batches(skip_first_batches(prepared, 1), 2)
    assert [b.tolist() for b in skipped] == [[14, 15]]
    stream = skip_first_batches(prepare_data_loader(DataLoader(Stream(8), batch_size=2)), 3)
    assert [b.tolist() for b in stream] == [[6, 7]]


def test_skipping_keeps_the_epoch_and_its_state_counts_from_the_start():
    def make():
        sampler = SeedableRandomSampler(range(16), data_seed=3)
        return DataLoaderShard(list(range(16)), batch_sampler=BatchSampler(sampler, 4, False))

    whole = make()
    whole.set_epoch(1)
    expected = [b.tolist() for b in whole]
    again = make()
    again.set_epoch(1)
    skipped = skip_first_batches(again, 1)
    batches = iter(skipped)
    assert next(batches).tolist() == expected[1]
    resumed = make()
    resumed.load_state_dict(skipped.state_dict())
    assert [b.tolist() for b in resumed] == expected[2:]


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_a_skipped_loader_that_is_resumed_skips_once(kind):
    def make():
        return skip_first_batches(kind(list(range(16)), batch_size=2), 2)

    loader = make()
    batches = iter(loader)
    assert next(batches).tolist() == [4, 5]
    state = loader.state_dict()
    again = make()
    again.load_state_dict(state)
    resumed = iter(again)
    assert next(resumed).tolist() == [6, 7]
    third = make()
    third.load_state_dict(again.state_dict())
    assert [batch.tolist() for batch in third] == [[8, 9], [10, 11], [12, 13], [14, 15]]


def test_dispatcher_resumes_without_reading_again():
    data = Counting(12)

    def make():
        return prepare_data_loader(
            DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5)),
            device="cpu",
            put_on_device=True,
            dispatch_batches=True,
        )

    loader = make()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    second = [batch.tolist() for batch in loader]
    data.read.clear()
    again = make()
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == rest
    assert len(data.read) == 10
    assert [batch.tolist() for batch in again] == second


def test_skip_batch_sampler_walks_any_sampler():
    assert list(SkipBatchSampler([[1], [2], [3]], 2)) == [[3]]


def test_loader_that_does_not_batch():
    loaders = shares(lambda: DataLoader([10, 11, 12], batch_size=None), 2)
    assert [[(x, loader.valid_count) for x in loader] for loader in loaders] == [
        [(10, None), (12, 1)],
        [(11, None), (10, 0)],
    ]


def test_dataset_that_is_asked_for_whole_batches():
    class Whole(Dataset):
        def __getitem__(self, indices):
            return torch.tensor(indices) * 10

        def __len__(self):
            return 8

    def make():
        return DataLoader(Whole(), sampler=BatchSampler(range(8), 2, False), batch_size=None)

    assert [[b.tolist() for b in loader] for loader in shares(make, 2)] == [[[0, 10], [40, 50]], [[20, 30], [60, 70]]]


def test_end_and_remainder_and_listener():
    class Listener:
        def __init__(self):
            self.events = []

        def loader_began(self, loader):
            self.events.append("began")

        def loader_ended(self, loader):
            self.events.append("ended")

    loader = prepare_data_loader(DataLoader(range(7), batch_size=2), num_processes=2, process_index=0)
    loader.gradient_state = Listener()
    assert [loader.end_of_dataloader for _ in loader] == [False, True]
    assert (loader.remainder, loader.total_batch_size, loader.total_dataset_length) == (3, 4, 7)
    batches = iter(loader)
    next(batches)
    del batches
    assert loader.gradient_state.events == ["began", "ended", "began", "ended"]


def test_prepared_loader_is_a_data_loader_and_pickles():
    loader = prepare_data_loader(DataLoader(list(range(4)), batch_size=2, shuffle=True), use_seedable_sampler=True)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderShard)
    assert len(loader) == 2
    assert loader.batch_sampler.batch_size == 2
    twin = pickle.loads(pickle.dumps(loader))
    assert [b.tolist() for b in twin] == [b.tolist() for b in loader]


def test_options_that_cannot_be_meant_are_refused():
    with pytest.raises(ValueError, match="put_on_device"):
        prepare_data_loader(DataLoader(range(4)), dispatch_batches=True)
    with pytest.raises(ValueError, match="round multiple"):
        prepare_data_loader(DataLoader(range(4), batch_size=3), num_processes=2, split_batches=True)
    with pytest.raises(ValueError, match="batch_size"):
        prepare_data_loader(DataLoader(range(4), batch_sampler=[[0]]), num_processes=2, split_batches=True)


def test_iterable_shard_shows_plain_samples_to_others():
    loader = prepare_data_loader(DataLoader(Stream(5), batch_size=2), num_processes=2, process_index=1)
    assert isinstance(loader.dataset, IterableDatasetShard)
    assert list(loader.dataset) == [2, 3, 1, 2]
    assert real(loader) == [[2, 3], []]


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_skipping_uses_up_a_position_that_was_loaded(kind):
    def make():
        return kind(list(range(16)), batch_size=2)

    interrupted = iter(loader := make())
    for _ in range(5):
        next(interrupted)
    again = make()
    again.load_state_dict(loader.state_dict())
    rest = iter(skip_first_batches(again, 5))
    assert next(rest).tolist() == [10, 11]
    third = make()
    third.load_state_dict(again.state_dict())  # of the loader that a checkpoint knows
    assert [batch.tolist() for batch in third] == [[12, 13], [14, 15]]
    assert len(list(rest)) == 2
    assert len(list(again)) == 8
    assert again.iteration == 2


@pytest.mark.parametrize("skips", [True, False])
def test_a_resumed_shuffle_draws_the_later_epochs_again(skips):
    def make():
        return prepare_data_loader(DataLoader(range(16), batch_size=2, shuffle=True))

    torch.manual_seed(5)
    loader = make()
    seen, states = [], []
    for _ in range(3):
        for batch in loader:
            seen.append(batch.tolist())
            states.append((loader.state_dict(), torch.get_rng_state()))
    again = make()
    again.load_state_dict(states[4][0])
    torch.set_rng_state(states[4][1])
    first = skip_first_batches(again, 5) if skips else again
    assert [batch.tolist() for part in (first, again, again) for batch in part] == seen[5:]
