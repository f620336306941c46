"""The token stream is one order, a pure function of (seed, epoch, index), whoever reads which part of it."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.data.cursor import Cursor
from piledriver.data.stream.loader import TokenLoader
from piledriver.data.stream.mixture import windows_by_weight
from piledriver.data.stream.token_stream import StreamConfig, TokenStream, open_stream
from piledriver.data.stream.windows.best_fit import best_fit
from piledriver.data.stream.windows.packed import PackedWindows
from piledriver.data.tokens.shard import TokenDocument, write_shard

PACKINGS = ["packed", "joined", "document", "best_fit"]
# What a checkpoint's cursor points into must never change: these are the orders of version 1.
KNOWN = {
    "packed": "83f9d7a27846",
    "joined": "83f9d7a27846",
    "document": "84fe2a17910a",
    "best_fit": "5899a6d550dd",
}
BOUNDARY = 0


@pytest.fixture(autouse=True, scope="module")
def _no_fsync():
    """These tests are about order, not about crashes: thousands of small files need not reach the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def write_tokens(folder: Path, lengths: list[tuple[str, str, int]], per_shard: int) -> dict[str, np.ndarray]:
    """Shards of numbered documents whose tokens are all different; each document with its boundary token."""
    documents, at = [], 1
    for number, (source, licence, length) in enumerate(lengths):
        ids = np.arange(at, at + length, dtype=np.uint32)
        at += length
        documents.append(TokenDocument(ids, 4 * length, source, licence, f"d{number}", f"file {number}"))
    for number in range(0, len(documents), per_shard):
        write_shard(folder, f"{number:05d}-000", documents[number : number + per_shard], BOUNDARY, "<u4")
    notes = [json.loads(path.read_text()) for path in sorted(folder.glob("*-000.json"))]
    manifest = {
        "format": "piledriver-tokens",
        "version": 1,
        "dtype": "<u4",
        "vocab_size": at,
        "boundary": BOUNDARY,
        "tokenizer": {"file": "tokenizer.json", "sha256": hashlib.sha256(b"").hexdigest()},
        "shard_tokens": 1 << 26,
        "unit_bytes": 1 << 25,
        "inputs": [],
        **{key: sum(note[key] for note in notes) for key in ("documents", "tokens", "bytes")},
        "shards": notes,
    }
    (folder / "tokenizer.json").write_bytes(b"")
    (folder / "tokens.json").write_text(json.dumps(manifest))
    return {document.id: np.concatenate([[BOUNDARY], document.ids]) for document in documents}


corpora = st.lists(
    st.tuples(st.sampled_from(["books", "code", "talk"]), st.sampled_from(["CC0", "MIT"]), st.integers(1, 40)),
    min_size=4,
    max_size=25,
)


def opened(folder, corpus, per_shard=4, **config) -> TokenStream:
    write_tokens(folder, corpus, per_shard)
    return open_stream(StreamConfig(tokens=str(folder), **config))


def windows_in(stream: TokenStream) -> int:
    return sum(stream.windows.counts.values())


@given(corpus=corpora, seq_len=st.integers(1, 12), packing=st.sampled_from(PACKINGS), seed=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_every_window_once_an_epoch_in_another_order_each_epoch(corpus, seq_len, packing, seed):
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder), corpus, 4)
        config = StreamConfig(tokens=folder, seq_len=seq_len, packing=packing, seed=seed)
        try:
            stream = open_stream(config)
        except Exception as error:
            assert "no windows" in str(error)
            return
        count = stream.epoch_windows
        assert count == windows_in(stream)
        first, second = stream.read(0, count), stream.read(count, count)
        assert sorted(map(bytes, first.inputs)) == sorted(map(bytes, second.inputs))
        # Every token of the corpus is an input of at most one window, and a label of at most one.
        mask = first.loss_mask()
        for tokens in (first.inputs[mask], first.labels[mask]):
            seen = Counter(tokens[tokens != BOUNDARY].tolist())
            assert max(seen.values(), default=1) == 1
        total = sum(length for _, _, length in corpus)
        if isinstance(stream.windows, PackedWindows):
            assert int((first.inputs[mask] != BOUNDARY).sum()) == total
            assert int((first.labels[mask] != BOUNDARY).sum()) == total
        else:
            assert count * seq_len + stream.windows.dropped_tokens == total + len(corpus)


@given(
    corpus=corpora,
    packing=st.sampled_from(PACKINGS),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stop=st.integers(0, 6),
)
@settings(max_examples=40, deadline=None)
def test_any_world_stopped_anywhere_and_resumed_on_any_other_reads_the_one_stream(corpus, packing, worlds, sizes, stop):
    with tempfile.TemporaryDirectory() as folder:
        stream = opened(Path(folder), corpus, seq_len=2, packing=packing)
        taken, cursor = _take(stream, stream.start, worlds[0], sizes[0], stop)
        rest, end = _take(stream, Cursor.from_bytes(cursor.to_bytes()), worlds[1], sizes[1], 3)
        together = np.concatenate([*taken, *rest]) if taken or rest else np.empty((0, 2))
        expected = stop * worlds[0] * sizes[0] + 3 * worlds[1] * sizes[1]
        assert stream.index_of(end) == expected
        np.testing.assert_array_equal(together, stream.read(0, expected).inputs.astype(np.int64))


def _take(stream, cursor, world, size, rounds):
    """Rounds of micro-batches of all ranks, in rank order, and the cursor that each of them would save."""
    loaders = [
        TokenLoader(stream, batch_size=size, rank=rank, size=world, cursor=cursor, prefetch=rank % 2)
        for rank in range(world)
    ]
    iterators = [iter(loader) for loader in loaders]
    taken = [next(iterator).inputs.numpy() for _ in range(rounds) for iterator in iterators]
    for iterator in iterators:
        iterator.close()
    assert len({loader.cursor for loader in loaders}) == 1
    return taken, loaders[0].cursor


@given(
    weights=st.fixed_dictionaries({name: st.integers(0, 20) for name in ("books", "code", "talk")}),
    epoch_windows=st.integers(1, 60),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=40, deadline=None)
def test_mixture_is_exact_over_every_epoch(weights, epoch_windows, seed):
    corpus = [(source, "MIT", length) for source in ("books", "code", "talk") for length in (13, 7, 22)]
    if not any(weights.values()):
        return
    with tempfile.TemporaryDirectory() as folder:
        stream = opened(Path(folder), corpus, seq_len=3, seed=seed, mixture=weights, epoch_windows=epoch_windows)
        asked = windows_by_weight(weights, epoch_windows)
        for name, count in asked.items():
            assert abs(count - epoch_windows * weights[name] / sum(weights.values())) < 1
        all_sources, all_windows = stream.mixture.locate(np.arange(4 * epoch_windows))
        for epoch in range(4):
            sources = all_sources[epoch * epoch_windows : (epoch + 1) * epoch_windows]
            found = Counter(stream.mixture.names[source] for source in sources)
            assert found == Counter({name: count for name, count in asked.items() if count})
        # Over all epochs so far no window of a source came twice more than another.
        for source, name in enumerate(stream.mixture.names):
            times = np.bincount(all_windows[all_sources == source], minlength=stream.windows.counts[name])
            assert times.max() - times.min() <= 1


@given(corpus=corpora, packing=st.sampled_from(PACKINGS), mixed=st.booleans(), seed=st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_where_a_window_stands_is_found_backwards(corpus, packing, mixed, seed):
    with tempfile.TemporaryDirectory() as folder:
        mixture = (
            {source: 1 + i for i, source in enumerate(sorted({source for source, _, _ in corpus}))} if mixed else None
        )
        stream = opened(Path(folder), corpus, seq_len=1, packing=packing, seed=seed, mixture=mixture)
        before = 3 * stream.epoch_windows + 1
        sources, windows = stream.mixture.locate(np.arange(before))
        for source, window in {
            (int(source), int(window)) for source, window in zip(sources[:5], windows[:5], strict=True)
        }:
            expected = np.flatnonzero((sources == source) & (windows == window)).tolist()
            assert stream.mixture.occurrences(source, window, before) == expected


@given(corpus=corpora, seq_len=st.integers(1, 12), packing=st.sampled_from(["packed", "document", "best_fit"]))
@settings(max_examples=40, deadline=None)
def test_document_masks_never_join_two_documents(corpus, seq_len, packing):
    with tempfile.TemporaryDirectory() as folder:
        texts = write_tokens(Path(folder), corpus, 4)
        owner = {int(token): name for name, tokens in texts.items() for token in tokens if token != BOUNDARY}
        try:
            stream = open_stream(StreamConfig(tokens=folder, seq_len=seq_len, packing=packing))
        except Exception as error:
            assert "no windows" in str(error)
            return
        windows = stream.read(0, stream.epoch_windows)
        edges = windows.cu_seqlens()
        flat, mask = windows.inputs.reshape(-1), windows.loss_mask().reshape(-1)
        assert edges[0] == 0
        assert edges[-1] == flat.size
        assert set(range(0, flat.size, seq_len)) <= set(edges.tolist()), "a document never runs from window to window"
        ids, positions = windows.document_ids().reshape(-1), windows.positions().reshape(-1)
        for number, (low, high) in enumerate(pairwise(edges)):
            real = flat[low:high][mask[low:high]]
            assert len({owner[int(token)] for token in real if token != BOUNDARY}) <= 1
            assert (real[1:] != BOUNDARY).all(), "a boundary token begins a document"
            assert (ids[low:high] == number).all()
            assert positions[low:high].tolist() == list(range(high - low))


@given(corpus=corpora)
@settings(max_examples=20, deadline=None)
def test_exclusion_leaves_nothing_of_what_is_excluded(corpus):
    with tempfile.TemporaryDirectory() as folder:
        texts = write_tokens(Path(folder), corpus, 4)
        if {(s, le) for s, le, _ in corpus} <= {("books", "CC0"), ("books", "MIT"), ("code", "MIT"), ("talk", "MIT")}:
            return
        named = {source for source, _, _ in corpus} & {"books"}
        licences = {licence for _, licence, _ in corpus} & {"MIT"}
        stream = open_stream(
            StreamConfig(
                tokens=folder,
                seq_len=1,
                packing="document",
                exclude_sources=tuple(named),
                exclude_licences=tuple(licences),
            )
        )
        kept = {
            int(token)
            for (source, licence, _), tokens in zip(corpus, texts.values(), strict=True)
            if source != "books" and licence != "MIT"
            for token in tokens
        }
        assert set(stream.read(0, stream.epoch_windows).inputs.reshape(-1).tolist()) == kept


@given(lengths=st.lists(st.integers(1, 16), max_size=60))
@settings(max_examples=100, deadline=None)
def test_best_fit_holds_every_piece_once_and_wastes_no_window(lengths):
    edges, items = best_fit(np.array(lengths, dtype=np.int64), 16)
    assert sorted(items.tolist()) == list(range(len(lengths)))
    used = [sum(lengths[i] for i in items[low:high]) for low, high in pairwise(edges)]
    assert all(0 < room <= 16 for room in used)
    # No two windows could have been one.
    assert all(a + b > 16 for a, b in pairwise(sorted(used)))


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_order_is_the_same_on_every_machine(tmp_path, packing):
    corpus = [(("books", "code")[i % 2], "MIT", 5 + 3 * i) for i in range(12)]
    stream = opened(tmp_path, corpus, seq_len=8, packing=packing, seed=5)
    digest = hashlib.sha256(np.ascontiguousarray(stream.read(0, 64).inputs).tobytes()).hexdigest()
    assert digest[:12] == KNOWN[packing]
