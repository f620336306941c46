"""The stream over real text: windows hold the text, batches reach the model, errors reach the user."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from piledriver.core.errors import ConfigError, CorruptFileError, UnknownNameError, UsageError
from piledriver.data import Cursor, StreamConfig, TokenLoader, open_stream, open_tokens


@pytest.fixture
def stream(tokens_folder):
    return open_stream(StreamConfig(tokens=str(tokens_folder), seq_len=64))


def test_windows_hold_the_text(stream, documents):
    tokenizer = stream.tokens.tokenizer()
    windows = stream.read(0, stream.epoch_windows)
    texts = "\x00".join(document.text for document in documents)
    np.testing.assert_array_equal(windows.inputs[:, 1:], windows.labels[:, :-1])
    for row in windows.inputs:
        for part in np.split(row, np.flatnonzero(row == stream.tokens.boundary)):
            part = part[part != stream.tokens.boundary]
            assert tokenizer.decode_bytes(part).decode("utf-8", "ignore") in texts


def test_documents_in_windows_of_their_own(tokens_folder, documents):
    stream = open_stream(StreamConfig(tokens=str(tokens_folder), seq_len=4096, packing="document"))
    windows = stream.read(0, stream.epoch_windows)
    tokenizer = stream.tokens.tokenizer()
    found = [tokenizer.decode(row[1:used]) for row, used in zip(windows.inputs, windows.used, strict=True)]
    assert sorted(found) == sorted(document.text for document in documents)
    assert all(row[used - 1] == stream.tokens.boundary for row, used in zip(windows.labels, windows.used, strict=True))


def test_best_fit_wastes_less_than_one_document_a_window(tokens_folder):
    padding = {}
    for packing in ("document", "best_fit"):
        stream = open_stream(StreamConfig(tokens=str(tokens_folder), seq_len=512, packing=packing))
        padding[packing] = stream.describe()["padding"]
        windows = stream.read(0, stream.epoch_windows)
        assert padding[packing] == pytest.approx(1 - windows.used.sum() / windows.inputs.size)
    assert padding["best_fit"] < 0.2 < padding["document"]


def test_mixture_and_exclusion_need_no_new_tokens(tokens_folder):
    whole = open_tokens(tokens_folder).sources
    stream = open_stream(
        StreamConfig(tokens=str(tokens_folder), seq_len=32, mixture={"books": 3, "code": 1}, epoch_windows=40)
    )
    assert stream.describe()["windows_by_source"] == {"books": 30, "code": 10}
    without = open_stream(StreamConfig(tokens=str(tokens_folder), seq_len=32, exclude_licences=("MIT",)))
    assert without.describe()["tokens"] < sum(whole.values()) * 0.7


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"exclude_sources": ("bokos",)}, UnknownNameError),
        ({"exclude_licences": ("BSD",)}, UnknownNameError),
        ({"mixture": {"poems": 1.0}}, UnknownNameError),
        ({"mixture": {"books": 0.0}}, UsageError),
        ({"seq_len": 10**6}, UsageError),
        ({"seq_len": 0}, ConfigError),
        ({"seed": -1}, ConfigError),
        ({"epoch_windows": 5}, ConfigError),
    ],
)
def test_configs_that_cannot_be_meant(tokens_folder, change, error):
    with pytest.raises(error):
        open_stream(StreamConfig(**{"tokens": str(tokens_folder), **change}))


def test_cursors_of_another_seed_or_length_are_refused(stream):
    with pytest.raises(ConfigError, match="seed 9"):
        stream.index_of(Cursor(seed=9))
    with pytest.raises(CorruptFileError, match="24 bytes"):
        Cursor.from_bytes(b"short")
    assert stream.advance(stream.start, 5 * stream.epoch_windows + 3) == Cursor(seed=0, epoch=5, index=3)


def test_batches_for_a_model(stream):
    batch = next(iter(TokenLoader(stream, batch_size=3)))
    windows = stream.read(0, 3)
    assert batch.inputs.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.inputs, torch.from_numpy(windows.inputs.astype(np.int64)))
    assert torch.equal(batch.positions(), torch.from_numpy(windows.positions().astype(np.int64)))
    assert torch.equal(batch.document_ids(), torch.from_numpy(windows.document_ids()))
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == int(batch.cu_seqlens.diff().max())


def test_padding_is_ignored_by_cross_entropy(tokens_folder):
    stream = open_stream(StreamConfig(tokens=str(tokens_folder), seq_len=512, packing="document"))
    batch = next(iter(TokenLoader(stream, batch_size=4)))
    windows = stream.read(0, 4)
    assert torch.equal(batch.labels != -100, torch.from_numpy(windows.loss_mask()))


def test_reading_ahead_changes_nothing_and_leaves_no_thread(stream):
    before = threading.active_count()
    ahead, plain = (iter(TokenLoader(stream, batch_size=2, prefetch=prefetch)) for prefetch in (3, 0))
    for _ in range(5):
        assert torch.equal(next(ahead).inputs, next(plain).inputs)
    ahead.close()
    assert threading.active_count() == before


def test_an_error_of_the_reading_thread_is_raised_where_batches_are_used(stream, monkeypatch):
    def broken(start, count):
        raise OSError("the disk is gone")

    monkeypatch.setattr(stream, "read", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(TokenLoader(stream, batch_size=2)))


def test_state_is_the_cursor_after_the_batch_in_hand(stream):
    loader = TokenLoader(stream, batch_size=2, size=2, rank=1, prefetch=2)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    assert state == {"cursor": Cursor(index=8).to_bytes()}
    expected = next(batches).inputs
    again = TokenLoader(stream, batch_size=2, size=2, rank=1)
    again.load_state_dict(state)
    assert torch.equal(next(iter(again)).inputs, expected)
    batches.close()
    with pytest.raises(UsageError):
        TokenLoader(stream, batch_size=2, rank=2, size=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_batches_on_a_gpu(stream, tokens_folder):
    for packing in ("packed", "best_fit"):
        stream = open_stream(StreamConfig(tokens=str(tokens_folder), seq_len=64, packing=packing))
        on_gpu = iter(TokenLoader(stream, batch_size=4, device="cuda"))
        on_cpu = iter(TokenLoader(stream, batch_size=4))
        for _ in range(20):
            here, there = next(on_cpu), next(on_gpu)
            assert torch.equal(here.inputs, there.inputs.cpu())
            assert torch.equal(here.labels, there.labels.cpu())
            assert torch.equal(here.positions(), there.positions().cpu())
        on_gpu.close()
        on_cpu.close()
