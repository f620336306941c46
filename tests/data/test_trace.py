"""Traces by arithmetic say what replaying the stream shows."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from piledriver.cli import tokenize as tokenize_verb
from piledriver.cli import trace as trace_verb
from piledriver.cli.tokenizer import train as train_verb
from piledriver.core.errors import CorruptFileError, StorageError, UsageError
from piledriver.data import StreamConfig, open_stream, record_stream, trace_document, trace_step
from piledriver.data.record import read_record

CONFIGS = [
    {"packing": "packed"},
    {"packing": "packed", "mixture": {"books": 2.0, "code": 1.0}},
    {"packing": "document"},
    {"packing": "best_fit", "exclude_licences": ("MIT",)},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_forwards_and_backwards_agree_with_a_replay(tmp_path, tokens_folder, documents, config):
    stream = open_stream(StreamConfig(tokens=str(tokens_folder), seq_len=48, seed=3, **config))
    record_stream(tmp_path, stream, windows_per_step=7)
    texts = {document.id: document.text.encode() for document in documents}
    tokenizer = stream.tokens.tokenizer()
    steps = 2 * stream.epoch_windows // 7 + 1
    forwards: dict[str, list] = {}
    for step in range(steps):
        sightings = trace_step(tmp_path, step)
        windows = stream.read(7 * step, 7)
        for number in range(7):
            here = [sighting for sighting in sightings if sighting.window == number]
            held = windows.inputs[number][windows.loss_mask()[number]]
            text = b"".join(texts[s.document][s.bytes[0] : s.bytes[1]] for s in here)
            assert text == tokenizer.decode_bytes(held[held != stream.tokens.boundary])
            assert sum(s.tokens[1] - s.tokens[0] for s in here) == len(held)
        for sighting in sightings:
            forwards.setdefault(sighting.document, []).append(sighting)
    for document in (documents[0], documents[7], documents[40]):
        backwards = trace_document(tmp_path, document.id, until=steps)
        expected = forwards.get(document.id, [])
        assert backwards == sorted(expected, key=lambda s: (s.step, s.window, s.tokens))
    assert any(forwards.get(document.id) for document in documents[:8])


def test_a_run_that_changes_its_batch_size_when_it_resumes(tmp_path, tokens_folder):
    stream = open_stream(StreamConfig(tokens=str(tokens_folder), seq_len=32))
    record_stream(tmp_path, stream, windows_per_step=4)
    record_stream(tmp_path, stream, windows_per_step=4, step=5, cursor=stream.advance(stream.start, 20))
    assert len(read_record(tmp_path)) == 1, "going on as before adds nothing"
    record_stream(tmp_path, stream, windows_per_step=10, step=8, cursor=stream.advance(stream.start, 32))
    record_stream(tmp_path, stream, windows_per_step=6, step=6, cursor=stream.advance(stream.start, 24))
    assert [(s.step, s.index, s.windows_per_step) for s in read_record(tmp_path)] == [(0, 0, 4), (6, 24, 6)]
    assert {sighting.index for sighting in trace_step(tmp_path, 5)} == {20, 21, 22, 23}
    assert {sighting.index for sighting in trace_step(tmp_path, 7)} == set(range(30, 36))
    name = trace_step(tmp_path, 7)[0].document
    assert 7 in {sighting.step for sighting in trace_document(tmp_path, name, until=8)}


def test_records_and_shards_that_do_not_fit_are_refused(tmp_path, tokens_folder):
    with pytest.raises(StorageError, match=r"stream\.json is missing"):
        trace_step(tmp_path, 0)
    folder = tmp_path / "tokens"
    shutil.copytree(tokens_folder, folder)
    stream = open_stream(StreamConfig(tokens=str(folder), seq_len=32))
    record_stream(tmp_path, stream, windows_per_step=4, step=2)
    with pytest.raises(UsageError, match="no step 1"):
        trace_step(tmp_path, 1)
    with pytest.raises(UsageError, match="no document 'nobody'"):
        trace_document(tmp_path, "nobody", until=9)
    manifest = folder / "tokens.json"
    manifest.write_text(manifest.read_text() + "\n")
    with pytest.raises(CorruptFileError, match=r"tokens.json: checksum .* differs from .* recorded in stream.json"):
        trace_step(tmp_path, 2)
    assert trace_step(tmp_path, 2, tokens=tokens_folder)
    (tmp_path / "stream.json").write_text("[]")
    with pytest.raises(CorruptFileError):
        trace_step(tmp_path, 2)


def verb(module, *words: object) -> None:
    parser = argparse.ArgumentParser()
    module.configure(parser)
    module.run(parser.parse_args([str(word) for word in words]))


def test_the_verbs(tmp_path, corpus, capsys):
    tokenizer, tokens = tmp_path / "t" / "tokenizer.json", tmp_path / "tokens"
    verb(train_verb, corpus, "-o", tokenizer, "--vocab-size", 300, "--weight", "books=2", "--json")
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 300
    with pytest.raises(UsageError, match="SOURCE=W"):
        verb(train_verb, corpus, "-o", tokenizer, "--vocab-size", 300, "--weight", "books")
    verb(tokenize_verb, corpus, "--tokenizer", tokenizer, "-o", tokens, "--verify", "--json")
    facts = json.loads(capsys.readouterr().out)
    assert facts["documents"] == 120
    verb(tokenize_verb, corpus, "--tokenizer", tokenizer, "-o", tokens)
    assert "120 documents" in capsys.readouterr().out
    stream = open_stream(StreamConfig(tokens=str(tokens), seq_len=64))
    record_stream(tmp_path, stream, windows_per_step=2)
    verb(trace_verb, tmp_path, "--step", 3, "--json")
    sightings = json.loads(capsys.readouterr().out)
    assert {"document", "source", "licence", "origin", "bytes"} <= set(sightings[0])
    verb(trace_verb, tmp_path, "--document", sightings[0]["document"], "--until", 4)
    assert "step 3" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--until"):
        verb(trace_verb, tmp_path, "--document", "x")


def test_byte_ranges_are_not_made_up(tmp_path, tokens_folder):
    folder = tmp_path / "tokens"
    shutil.copytree(tokens_folder, folder)
    (folder / "piece_bytes.npy").unlink()
    stream = open_stream(StreamConfig(tokens=str(folder), seq_len=32))
    record_stream(tmp_path, stream, windows_per_step=1)
    assert all(sighting.bytes is None for sighting in trace_step(tmp_path, 0))
    assert np.all([sighting.tokens[1] > sighting.tokens[0] for sighting in trace_step(tmp_path, 0)])


def test_a_run_is_traced_from_any_folder(tmp_path, tokens_folder, monkeypatch):
    """Training was told `tokens: run/tokens`, which means nothing elsewhere."""
    shutil.copytree(tokens_folder, tmp_path / "run" / "tokens")
    monkeypatch.chdir(tmp_path)
    record_stream("run", open_stream(StreamConfig(tokens="run/tokens", seq_len=32)), windows_per_step=1)
    here = trace_step("run", 3)
    monkeypatch.chdir("/")
    assert trace_step(tmp_path / "run", 3) == here
    shutil.rmtree(tmp_path / "run" / "tokens")
    with pytest.raises(StorageError, match=r"not at run/tokens or .*Fix: give their folder with --tokens"):
        trace_step(tmp_path / "run", 3)


def test_shards_beside_a_run_are_found_from_any_folder_and_after_a_move(tmp_path, tokens_folder, monkeypatch):
    work = tmp_path / "work"
    shutil.copytree(tokens_folder, work / "shards")
    (work / "here").mkdir()
    monkeypatch.chdir(work / "here")
    stream = open_stream(StreamConfig(tokens="../shards", seq_len=32))
    record_stream("../runs/first", stream, windows_per_step=4)
    seen = trace_step("../runs/first", 1)
    work.rename(tmp_path / "moved")
    other = tmp_path / "other" / "here"
    other.mkdir(parents=True)
    monkeypatch.chdir(other)
    assert trace_step("../../moved/runs/first", 1) == seen
    # Shards of somebody else that lie where the user stood are not taken for the run's.
    shutil.copytree(tokens_folder, "../shards")
    manifest = Path("../shards/tokens.json")
    manifest.write_text(manifest.read_text() + "\n")
    assert trace_step("../../moved/runs/first", 1) == seen
