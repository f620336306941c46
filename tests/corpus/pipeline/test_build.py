"""A build: the same bytes whatever happens on the way, exactly what was asked for, and loud when it cannot be."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from piledriver.core.errors import ConfigError, MissingFileError, PiledriverError, UnknownNameError, UsageError
from piledriver.corpus import read_shards
from piledriver.corpus.pipeline.build import build_corpus
from piledriver.corpus.pipeline.manifest import load_manifest, verify_corpus
from piledriver.corpus.pipeline.recipe import load_recipe
from piledriver.corpus.pipeline.tasks import Task, execute_task
from piledriver.corpus.text.token_counts import TokenCounter

pytestmark = pytest.mark.slow

WORDS = [f"word{i}" for i in range(3000)]


def raw_files(folder: Path) -> None:
    """Two sources of 120 documents; every tenth is an exact copy, every tenth an edit of the one before."""
    luck = random.Random(0)
    for source in ("one", "two"):
        (folder / source).mkdir(parents=True)
        previous: list[str] = ["start"]
        for i in range(120):
            words = previous if i % 10 == 1 else luck.choices(WORDS, k=200)
            if i % 10 == 2:
                words = [*previous[:100], "edited", *previous[101:]]
            (folder / source / f"{i:03d}.txt").write_text(" ".join(words) + f"\n\n{source if i % 10 > 2 else ''}")
            previous = words


RECIPE = """
name: trial
seed: {seed}
shard_bytes: 60_000
splits: {{validation: 0.05, test: 0.05}}
sources:
  - {{source: text, name: One, paths: [raw/one], epochs: 2.5}}
  - {{source: text, name: Two, paths: [raw/two], epochs: 1}}
stages:
  - {{use: length, settings: {{min_characters: 100}}}}
  - {{use: exact}}
  - {{use: near}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    raw_files(folder / "raw")
    (folder / "recipe.yaml").write_text(RECIPE.format(seed=7))
    return folder


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> dict[str, bytes]:
    build_corpus(load_recipe(place / "recipe.yaml"), str(place / "undisturbed"), workers=1)
    return content(place / "undisturbed")


def content(corpus: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(corpus)): path.read_bytes()
        for path in corpus.rglob("*")
        if path.is_file() and ".work" not in path.parts and path.name != ".lock"
    }


def test_the_bytes_are_the_same_for_any_number_of_workers(place: Path, undisturbed: dict[str, bytes]) -> None:
    build_corpus(load_recipe(place / "recipe.yaml"), str(place / "three"), workers=3)
    assert content(place / "three") == undisturbed
    assert verify_corpus(place / "three") == []


def test_a_budget_in_tokens(place: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (place / "tokenizer").mkdir()
    words.save(str(place / "tokenizer" / "tokenizer.json"))
    counted = RECIPE.format(seed=7).replace("epochs: 2.5", "tokens: 30_000")
    with pytest.raises(ConfigError, match="there is no tokenizer"):
        (place / "tokens.yaml").write_text(counted)
        load_recipe(place / "tokens.yaml")
    (place / "tokens.yaml").write_text(counted + "tokenizer: tokenizer\n")
    manifest = build_corpus(load_recipe(place / "tokens.yaml"), str(place / "tokens"))
    mine = [d.text for d in read_shards(place / "tokens" / "train") if d.source == "One"]
    got = sum(len(text.split()) for text in mine)
    size = sum(len(text.encode()) for text in mine)
    assert manifest.mix["One"] == {"asked_tokens": 30_000, "got_tokens": got, "got_bytes": size}
    assert abs(got - 30_000) <= max(len(text.split()) for text in mine), "within one document"
    assert manifest.recipe["tokenizer"] == "tokenizer", "no path of the machine"
    pair = place / "gpt2"
    pair.mkdir()
    (pair / "vocab.json").write_text(json.dumps({"w": 0, "o": 1, "wo": 2, "<|endoftext|>": 3}))
    (pair / "merges.txt").write_text("#version: 0.2\nw o\n")
    assert [TokenCounter(str(path)).count("wowo") for path in (pair, pair / "vocab.json")] == [2, 2]
    damaged = place / "tokenizer" / "tokenizer.json"
    damaged.write_text("{}")
    with pytest.raises(PiledriverError, match="is not a tokenizer"):
        build_corpus(load_recipe(place / "tokens.yaml"), str(place / "tokens"))


def test_everything_asked_for_is_there_exactly(place: Path, undisturbed: dict[str, bytes]) -> None:
    manifest = load_manifest(place / "undisturbed")
    near = next(stage for stage in manifest.stages if stage["stage"] == "near")["sources"]
    train = list(read_shards(place / "undisturbed" / "train"))
    copies = Counter(document.id for document in train)
    by_source = {name: [d for d in train if d.source == name] for name in ("One", "Two")}
    assert set(Counter(copies[d.id] for d in by_source["One"])) == {2, 3}
    assert {copies[d.id] for d in by_source["Two"]} == {1}
    size = sum(len({d.id: d for d in by_source["One"]}[i].text.encode()) for i in {d.id for d in by_source["One"]})
    got = sum(len(d.text.encode()) for d in by_source["One"])
    assert manifest.mix["One"] == {"asked_bytes": 2.5 * size, "got_bytes": got}
    assert abs(got - 2.5 * size) <= max(len(d.text.encode()) for d in by_source["One"]), "within one document"
    held_out = [d for split in ("validation", "test") for d in read_shards(place / "undisturbed" / split)]
    assert held_out
    assert not {d.id for d in held_out} & set(copies)
    assert len(copies) + len(held_out) == sum(account["documents"] for account in near.values())
    assert len([p for p in undisturbed if p.startswith("train/")]) > 3, "several shards"
    assert [d.id for d in by_source["Two"]] != sorted(d.id for d in by_source["Two"]), "shuffled"


def test_the_ledger_names_every_document_that_went_and_what_was_kept(
    place: Path, undisturbed: dict[str, bytes]
) -> None:
    rows = pq.read_table(place / "undisturbed" / "ledger.parquet").to_pylist()
    reasons = Counter((row["stage"], row["reason"]) for row in rows)
    # Every tenth document is a copy in each source, and every tenth an edit.
    assert reasons == {("exact", "exact duplicate"): 24, ("near", "near duplicate"): 24}
    manifest = load_manifest(place / "undisturbed")
    assert sum(n for s in manifest.stages for a in s["sources"].values() for n in a["dropped"].values()) == len(rows)
    kept = {d.id for split in ("train", "validation", "test") for d in read_shards(place / "undisturbed" / split)}
    assert all(row["kept"] in kept and row["id"] not in kept for row in rows)


def test_only_what_a_change_touches_runs_again(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    raw_files(tmp_path / "raw")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(seed=7))
    build_corpus(load_recipe(tmp_path / "recipe.yaml"), str(out), keep_work=True)
    before = _tasks(out)
    build_corpus(load_recipe(tmp_path / "recipe.yaml"), str(out), keep_work=True)
    assert _tasks(out) == before, "nothing changed, nothing ran"
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(seed=8))
    build_corpus(load_recipe(tmp_path / "recipe.yaml"), str(out), keep_work=True)
    shuffled = _tasks(out) - before
    assert shuffled
    assert len(shuffled) < len(before) / 2, "another seed touches the mix alone"
    (tmp_path / "raw" / "one" / "new.txt").write_text(" ".join(WORDS[:300]))
    build_corpus(load_recipe(tmp_path / "recipe.yaml"), str(out), keep_work=True)
    assert any("word299" in document.text and "word0 " in document.text for document in read_shards(out / "train"))
    assert verify_corpus(out) == []


def _tasks(out: Path) -> set[str]:
    return {path.name for path in (out / ".work").glob("*/*")}


def test_damage_is_found(place: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    for name, data in undisturbed.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert verify_corpus(tmp_path) == []
    shard = tmp_path / "train" / "00001.jsonl.zst"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    (tmp_path / "train" / "00000.jsonl.zst").unlink()
    (tmp_path / "train" / "99999.jsonl.zst").write_bytes(b"")
    assert len(verify_corpus(tmp_path)) == 3


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (("use: exact", "use: exct"), UnknownNameError, "did you mean 'exact'"),
        (("min_characters: 100", "min_charcters: 100"), ConfigError, "did you mean 'min_characters'"),
        (("use: near", "use: near, settings: {preset: x}"), ConfigError, "one of 'piledriver', 'datatrove', 'pile'"),
        (("source: text, name: One", "source: txet, name: One"), UsageError, "did you mean 'text'"),
        (("name: One", "name: Two"), ConfigError, "twice"),
        (("epochs: 2.5", "epochs: 2.5, weight: 1"), ConfigError, "give one of"),
        (("epochs: 2.5", "epochs: -1"), ConfigError, "must not be negative"),
        (("raw/one", "raw/nowhere"), MissingFileError, "does not exist"),
        (("validation: 0.05", "validation: 0.96"), ConfigError, "under 1 together"),
        (("min_characters: 100", "min_characters: 1000000"), PiledriverError, "every document was dropped"),
    ],
)
def test_a_wrong_recipe_is_refused_with_its_fix(
    change: tuple[str, str], error: type[Exception], said: str, place: Path, tmp_path: Path
) -> None:
    os.symlink(place / "raw", tmp_path / "raw")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(seed=7).replace(*change, 1))
    with pytest.raises(error, match=said):
        build_corpus(load_recipe(tmp_path / "recipe.yaml"), str(tmp_path / "out"))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_task_runs_once_and_its_folder_is_whole(tmp_path: Path) -> None:
    task = Task.call(write_then_fail, fail=True)
    with pytest.raises(RuntimeError):
        execute_task((str(tmp_path), task))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    good = Task.call(write_then_fail, fail=False)
    done = execute_task((str(tmp_path), good))
    assert execute_task((str(tmp_path), good)) == done
    assert good.key != task.key
    assert Path(done.path("half")).read_text() == "half"


def write_then_fail(folder: str, fail: bool) -> dict[str, int]:
    """A task of these tests."""
    Path(folder, "half").write_text("half")
    if fail:
        raise RuntimeError("half way")
    return {"n": 1}
