"""Text to token shards: every document, the same bytes however it was run, and nothing wrong is opened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from piledriver.core.errors import CorruptFileError, PiledriverError, StorageError, UsageError
from piledriver.corpus.shards import writer as shard_writer
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.training import TokenizerTraining, train_tokenizer
from piledriver.data.tokens import tokenize as tokenize_module
from piledriver.data.tokens.token_set import TokenizerMismatchError, open_tokens
from piledriver.data.tokens.tokenize import TokenizeConfig, tokenize_corpus


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_document_is_there_with_its_provenance(tokens_folder, documents):
    tokens = open_tokens(tokens_folder, check="all")
    tokenizer = tokens.tokenizer()
    found = {}
    for number, shard in enumerate(tokens.shards):
        for row in range(shard.metadata["documents"]):
            place = tokens.place(number, row)
            text = tokenizer.decode(tokens.document(number, row))
            found[place.id] = (text, place.source, place.licence, place.origin, place.byte_count)
            assert shard.tokens[place.start] == tokens.boundary
    assert found == {
        d.id: (d.text, d.source, d.meta["licence"], d.meta["origin"], len(d.text.encode())) for d in documents
    }
    assert sum(tokens.sources.values()) == tokens.tokens
    assert [place.id for place in tokens.find("doc-0-7")] == ["doc-0-7"]
    assert len(tokens.shards) > 3, "the corpus fills several shards per file"


def test_the_files_are_readable_with_numpy_alone(tokens_folder, documents):
    name = sorted(tokens_folder.glob("*.tokens.npy"))[0].name.removesuffix(".tokens.npy")
    tokens = np.load(tokens_folder / f"{name}.tokens.npy", mmap_mode="r")
    starts = np.load(tokens_folder / f"{name}.starts.npy")
    index = np.load(tokens_folder / f"{name}.index.npy")
    names = np.load(tokens_folder / f"{name}.names.npy").tobytes()
    assert tokens.dtype == np.uint16
    by_id = {document.id: document for document in documents}
    document = by_id[names[index["id"][0] : index["origin"][0]].decode()]
    assert index["byte"][1] - index["byte"][0] == len(document.text.encode())
    assert starts[-1] == len(tokens)


def test_an_edit_in_the_middle_of_an_input_is_seen(tmp_path, tokenizer_path):
    rows = [{"text": f"document {i} " * 40, "meta": {"licence": "MIT"}} for i in range(2000)]
    shard, out = tmp_path / "in.jsonl", tmp_path / "out"
    shard.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize_corpus(shard, tokenizer_path, out)
    status, content = shard.stat(), shard.read_bytes()
    middle = content.index(b"MIT", len(content) // 2)
    shard.write_bytes(content[:middle] + b"GPL" + content[middle + 3 :])
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UsageError, match=r"begun with other content of in\.jsonl"):
        tokenize_corpus(shard, tokenizer_path, out)
    shard.write_bytes(content)
    assert tokenize_corpus(shard, tokenizer_path, out).licences.keys() == {"MIT"}


def test_an_input_that_changes_while_it_is_read_is_not_finished(tmp_path, tokenizer_path, monkeypatch):
    shard = tmp_path / "in.jsonl"
    shard.write_text('{"text": "one two three"}\n')
    run = tokenize_module.run_task

    def edit_and_run(task):
        shard.write_text('{"text": "one two trees"}\n')
        return run(task)

    monkeypatch.setattr(tokenize_module, "run_task", edit_and_run)
    with pytest.raises(PiledriverError, match="changed while it was tokenised"):
        tokenize_corpus(shard, tokenizer_path, tmp_path / "out")
    assert not (tmp_path / "out" / "tokens.json").exists()


def test_a_folder_that_version_0_1_began_is_resumed(tmp_path, corpus, tokenizer_path, tokens_folder):
    """Version 0.1 recognised inputs by their first and last bytes."""
    out = tmp_path / "out"
    shutil.copytree(tokens_folder, out)
    for name in ("job.json", "tokens.json"):
        tree = json.loads((out / name).read_text())
        tree["inputs"] = [tokenize_module._describe_0_1(str(path), corpus) for path in sorted(Path(corpus).iterdir())]
        (out / name).write_text(json.dumps(tree))
    assert tokenize_corpus(corpus, tokenizer_path, out, TokenizeConfig(shard_tokens=2000)).documents


@pytest.mark.slow
def test_workers_do_not_change_a_byte(tmp_path, corpus, tokenizer_path, tokens_folder):
    tokenize_corpus(corpus, tokenizer_path, tmp_path / "out", TokenizeConfig(shard_tokens=2000), workers=2)
    assert contents(tmp_path / "out") == contents(tokens_folder)


@pytest.mark.slow
def test_killed_anywhere_it_goes_on_to_the_same_bytes(tmp_path, corpus, tokenizer_path, tokens_folder):
    out = tmp_path / "out"
    script = (
        "import sys; from piledriver.data.tokens.tokenize import *\n"
        "tokenize_corpus(sys.argv[1], sys.argv[2], sys.argv[3], TokenizeConfig(shard_tokens=2000))"
    )
    killed = 0
    for shards in (1, 3, 5):
        process = subprocess.Popen(
            [sys.executable, "-c", script, corpus, tokenizer_path, out], stderr=subprocess.DEVNULL
        )
        while process.poll() is None and len(list(out.glob("*.tokens.npy"))) < shards:
            time.sleep(0.001)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.wait()
    assert killed > 0
    tokenize_corpus(corpus, tokenizer_path, out, TokenizeConfig(shard_tokens=2000))
    found = {name: content for name, content in contents(out).items() if not name.endswith(".partial")}
    assert found == contents(tokens_folder)


def test_large_files_are_cut_by_frames(tmp_path, tokenizer_path, documents, write_corpus, monkeypatch):
    monkeypatch.setattr(shard_writer, "FRAME_BYTES", 4096)
    write_corpus(tmp_path / "corpus", documents)
    tokens = tokenize_corpus(tmp_path / "corpus", tokenizer_path, tmp_path / "out", TokenizeConfig(unit_bytes=8000))
    assert len(tokens.shards) > 3
    assert tokens.documents == len(documents)


def test_another_job_does_not_mix_in(tmp_path, corpus, tokenizer_path):
    out = tmp_path / "out"
    tokenize_corpus(corpus, tokenizer_path, out)
    before = contents(out)
    assert contents(out) == before
    tokenize_corpus(corpus, tokenizer_path, out)
    assert contents(out) == before, "a finished job is left as it is"
    with pytest.raises(UsageError, match="another corpus, tokenizer or setting"):
        tokenize_corpus(corpus, tokenizer_path, out, TokenizeConfig(shard_tokens=99))


@pytest.mark.parametrize("kind", ["tokens", "starts", "index", "names"])
@pytest.mark.parametrize("how", ["truncate", "flip", "remove"])
def test_damage_is_refused_at_open(tmp_path, tokens_folder, kind, how):
    folder = tmp_path / "tokens"
    shutil.copytree(tokens_folder, folder)
    path = sorted(folder.glob(f"*.{kind}.npy"))[0]
    content = bytearray(path.read_bytes())
    if how == "truncate":
        path.write_bytes(content[:-3])
    elif how == "flip":
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    with pytest.raises(CorruptFileError, match=path.name):
        open_tokens(folder, check="all" if (kind, how) == ("tokens", "flip") else "index")


def test_manifests_that_lie_are_refused(tmp_path, tokens_folder):
    folder = tmp_path / "tokens"
    shutil.copytree(tokens_folder, folder)
    manifest = json.loads((folder / "tokens.json").read_text())

    def rewritten(**changes):
        (folder / "tokens.json").write_text(json.dumps({**manifest, **changes}))

    rewritten(vocab_size=10)
    with pytest.raises(CorruptFileError, match="vocabulary has 10"):
        open_tokens(folder)
    rewritten(version=9)
    with pytest.raises(CorruptFileError, match="version 9"):
        open_tokens(folder)
    (folder / "tokens.json").write_text("{")
    with pytest.raises(CorruptFileError):
        open_tokens(folder)
    (folder / "tokens.json").unlink()
    with pytest.raises(StorageError, match="no complete token shards"):
        open_tokens(folder)


def test_tokenizer_and_model_have_to_match(tmp_path, corpus, tokens_folder, tokenizer_path):
    open_tokens(tokens_folder, tokenizer=open_tokenizer(tokenizer_path), vocab_size=320)
    with pytest.raises(TokenizerMismatchError, match="another tokenizer"):
        open_tokens(tokens_folder, tokenizer=train_tokenizer(corpus, TokenizerTraining(vocab_size=300)))
    with pytest.raises(TokenizerMismatchError, match="the model has 256 ids"):
        open_tokens(tokens_folder, vocab_size=256)


def test_corpora_that_are_not_there(tmp_path, tokenizer_path):
    with pytest.raises(PiledriverError):
        tokenize_corpus(tmp_path / "nothing", tokenizer_path, tmp_path / "out")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(PiledriverError, match="has no documents"):
        tokenize_corpus(tmp_path / "empty.jsonl", tokenizer_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(PiledriverError, match="no text to train on"):
        train_tokenizer(tmp_path / "empty.jsonl")
