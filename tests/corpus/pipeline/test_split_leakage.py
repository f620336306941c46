"""The splits are apart: nothing in one says the same, or nearly the same, as something in another."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from piledriver.cli.main import main
from piledriver.corpus import read_shards
from piledriver.corpus.document import Document
from piledriver.corpus.pipeline.build import build_corpus
from piledriver.corpus.pipeline.manifest import load_manifest, verify_corpus
from piledriver.corpus.pipeline.recipe import load_recipe
from piledriver.corpus.pipeline.split_leakage import find_split_leakage
from piledriver.corpus.shards.writer import ShardFileWriter

pytestmark = pytest.mark.slow


def sentences(seed: int, count: int = 12) -> str:
    luck = random.Random(seed)
    return "\n".join(f"{' '.join(f'w{luck.randrange(10**6)}' for _ in range(9))}." for _ in range(count))


def built(folder: Path, texts: dict[str, str], stages: str) -> Path:
    (folder / "raw").mkdir()
    for name, text in texts.items():
        (folder / "raw" / f"{name}.txt").write_text(text)
    (folder / "recipe.yaml").write_text(
        "splits: {validation: 0.3, test: 0.2}\nsources: [{source: text, name: One, paths: [raw], epochs: 2}]\n"
        f"stages: [{stages}]\n"
    )
    build_corpus(load_recipe(folder / "recipe.yaml"), str(folder / "out"))
    return folder / "out"


def test_copies_and_edits_go_the_same_way_where_no_stage_drops_them(tmp_path: Path) -> None:
    texts = {}
    for i in range(30):
        texts[f"{i}a"] = sentences(i)
        # Another case is another word to the signatures where a letter is not ASCII, yet it is the same document.
        texts[f"{i}b"] = sentences(i).replace("w1", "é").upper() if i % 2 else sentences(i).replace(".", " .", 1)
        texts[f"{i}c"] = sentences(i).replace("w1", "é") if i % 2 else sentences(i) + "\nmore words"
    out = built(tmp_path, texts, "")
    assert {split: len(list(read_shards(out / split))) > 0 for split in ("train", "validation", "test")} == {
        "train": True,
        "validation": True,
        "test": True,
    }
    assert list(find_split_leakage(str(out))) == []


def test_documents_that_a_late_stage_made_alike_go_the_same_way(tmp_path: Path) -> None:
    """Each pair is apart when near-duplicates are looked for, and equal when C4 has taken out what is no sentence."""
    texts = {
        f"{i}{j}": "\n".join(
            f"{line}\n{' '.join(f'junk{i}{j}{n}x{k}' for k in range(12))}"
            for n, line in enumerate(sentences(i).split("\n"))
        )
        for i in range(20)
        for j in range(2)
    }
    out = built(tmp_path, texts, "{use: near}, {use: c4}")
    assert len(list(read_shards(out / "validation"))) > 4
    assert list(find_split_leakage(str(out))) == []


def test_a_planted_duplicate_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = built(tmp_path, {str(i): sentences(i) for i in range(30)}, "{use: near}")
    assert main(["corpus", "verify", str(out), "--splits", "--workers", "1"]) == 0
    assert "no exact or near duplicate is in two splits" in capsys.readouterr().out
    stolen = next(iter(read_shards(out / "train")))
    held_out = [*read_shards(out / "validation")]
    path = out / "validation" / "00000.jsonl.zst"
    with ShardFileWriter(path) as shard:
        for document in held_out:
            shard.write(document)
        shard.write(Document(stolen.text.replace(" w", " x", 1), "planted", "One"))
    manifest = load_manifest(out)
    outputs = [
        {**entry, "documents": shard.summary.documents, "sha256": shard.summary.sha256}
        if entry["path"] == "validation/00000.jsonl.zst"
        else entry
        for entry in manifest.outputs
    ]
    dataclasses.replace(manifest, outputs=outputs).save(out)
    assert verify_corpus(out) == []
    # Two copies of it are in training: each is a line.
    assert list(find_split_leakage(str(out))) == [f"train: document {stolen.id} is like planted of validation"] * 2
    assert main(["corpus", "verify", str(out), "--splits", "--workers", "1"]) == 1
    assert "is like planted of validation" in capsys.readouterr().out
