"""A finished corpus: its card, its ledger on the command line, and the deduplication of shards."""

from __future__ import annotations

import importlib.util
import inspect
import json
import random
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from piledriver.cli.main import main
from piledriver.corpus import read_shards
from piledriver.corpus.card import facts as facts_module
from piledriver.corpus.card.facts import card_facts
from piledriver.corpus.card.html import card_page
from piledriver.corpus.card.readme import card_header, card_readme, size_category
from piledriver.corpus.document import make_document
from piledriver.corpus.pipeline.build import build_corpus
from piledriver.corpus.pipeline.manifest import load_manifest, verify_corpus
from piledriver.corpus.pipeline.recipe import load_recipe
from piledriver.corpus.shards.writer import ShardFileWriter

pytestmark = pytest.mark.slow

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> </pre> \"'>&<!--TITLE--> | `code` \\ "


def prose(seed: int, count: int = 80) -> str:
    luck = random.Random(seed)
    return " ".join(f"word{luck.randrange(5000)}" for _ in range(count))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    (folder / "raw").mkdir()
    for i in range(20):
        (folder / "raw" / f"{i}.txt").write_text(HOSTILE + prose(i))
    (folder / "raw" / "near.txt").write_text(HOSTILE + prose(0) + " again")
    (folder / "raw" / "short.txt").write_text("short")
    (folder / "recipe.yaml").write_text(
        "name: 'A <b>bold</b> corpus'\nsplits: {validation: 0.2, test: 0}\n"
        "sources: [{source: text, name: '<i>One</i>', paths: [raw]}]\n"
        "stages: [{use: length, settings: {min_characters: 20}}, {use: near}]\n"
    )
    build_corpus(load_recipe(folder / "recipe.yaml"), str(folder / "out"))
    return folder / "out"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_everything_and_runs_nothing(corpus: Path) -> None:
    facts = card_facts(corpus)
    made = card_page(facts)
    parsed = Tags()
    parsed.feed(made)
    assert not {"script", "img", "iframe", "link", "b>bold"} & set(parsed.tags)
    assert parsed.tags.count("title") == 1
    assert not [name for name in parsed.attributes if name.startswith("on") or name in ("src", "href")]
    assert "http://" not in made
    assert "https://" not in made
    for said in (
        "A <b>bold</b> corpus",
        "<i>One</i>",
        HOSTILE.split(" | ")[0],
        "near duplicate",
        "too short",
        "2 documents",
    ):
        assert said in parsed.text
    assert sum(facts.lengths.values()) == facts.documents_read == 20
    assert facts.drops == {("length", "too short"): 1, ("near", "near duplicate"): 1}
    assert dict(facts.clusters) == {2: 1}
    assert facts.composition["<i>One</i>"].extracted == 22
    assert facts.composition["<i>One</i>"].documents == 20


def test_the_readme_has_a_header_that_the_hub_takes(corpus: Path) -> None:
    facts = card_facts(corpus, read_documents=4)
    text = card_readme(facts)
    _, raw, body = text.split("---\n", 2)
    meta = yaml.safe_load(raw)
    assert meta == card_header(facts)
    assert meta["license"] == "other"
    assert meta["license_name"] == "per-document"
    assert re.fullmatch(r"[a-z0-9-]+", meta["license_name"])
    assert meta["size_categories"] == ["n<1K"]
    assert {entry["split"] for entry in meta["configs"][0]["data_files"]} == {"train", "validation"}
    assert "<i>" not in body
    assert r"\<i\>One\</i\>" in body
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert all(line.count("|") - line.count(r"\|") in (3, 4, 6) for line in rows)


def test_numbers_do_not_break_on_a_small_screen(corpus: Path) -> None:
    style = card_page(card_facts(corpus)).partition("</style>")[0]
    rules = [line for line in style.splitlines() if line.startswith((".bars", ".plain"))]
    breaking = [line for line in rules if "overflow-wrap: anywhere" in line]
    assert [line.partition("{")[0] for line in breaking] == [".plain th:first-child, .plain td:first-child "]
    assert ".wide { overflow-x: auto; }" in style


def test_the_header_names_what_is_there(corpus: Path) -> None:
    facts = card_facts(corpus)
    facts.licences = {"public-domain": 2, "CC0-1.0": 1}
    facts.languages = Counter({"en": 994, "de": 4, "la": 2})
    assert card_header(facts)["license"] == ["cc0-1.0", "other"], "a text in the public domain has no licence"
    assert card_header(facts)["language"] == ["en"], "a few documents may be errors of the detector"


def test_evaluation_texts_are_one_row_for_each_file(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = load_manifest(corpus)
    hits = {"lambada.jsonl#1": 2, "lambada.jsonl#7": 1, "a.txt": 4}
    manifest.stages.append({"stage": "decontaminate", "sources": {"One": {"dropped": {}, "hits": hits}}})
    with monkeypatch.context() as patched:
        patched.setattr(facts_module, "load_manifest", lambda _: manifest)
        patched.setattr(facts_module, "_last", lambda _: {})
        found = card_facts(corpus).taken_out
    assert found == {"decontaminate: hits": {"lambada.jsonl": 3, "a.txt": 4}}


@pytest.mark.skipif(importlib.util.find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed")
def test_the_hubs_own_library_reads_the_card(corpus: Path) -> None:
    from huggingface_hub import DatasetCard, DatasetCardData

    facts = card_facts(corpus)
    facts.licences = {"CC-BY-4.0": 3, "GPL-2.0-or-later": 1, "CC-BY-SA-2.5": 1, "yours": 1, "public-domain": 1}
    facts.languages = Counter({"en": 3, "iw": 2, "zh-Hant": 1, "unknown": 1})
    card = DatasetCard(card_readme(facts))
    assert isinstance(card.data, DatasetCardData)
    assert card.data.to_dict() == card_header(facts)
    assert card.data.license == ["cc-by-4.0", "gpl-2.0", "other"]
    assert card.data.language == ["en", "he"]
    assert card.data.license_name == "per-document"
    assert card.text.strip().startswith("# A \\<b\\>bold")
    # What the library does not know as a field would be kept apart without a word.
    known = set(inspect.signature(DatasetCardData.__init__).parameters) | {"configs", "license_name", "license_link"}
    assert set(card_header(facts)) <= known


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
def test_the_splits_of_the_header_load(corpus: Path, tmp_path: Path) -> None:
    from datasets import load_dataset

    assert main(["corpus", "card", str(corpus)]) in (0, None)
    loaded = load_dataset(str(corpus), cache_dir=str(tmp_path))
    expected = {split: count for split, count in card_facts(corpus).splits.items() if count}
    assert {split: rows.num_rows for split, rows in loaded.items()} == expected


def test_sizes_have_the_hubs_names() -> None:
    assert [size_category(n) for n in (0, 999, 1000, 10**6, 10**11)] == [
        "n<1K",
        "n<1K",
        "1K<n<10K",
        "1M<n<10M",
        "100B<n<1T",
    ]


def test_the_verbs_write_the_card_and_show_what_was_dropped(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["corpus", "card", str(corpus)]) == 0
    assert (corpus / "card.html").exists()
    assert (corpus / "README.md").exists()
    assert verify_corpus(corpus) == []
    capsys.readouterr()
    assert main(["corpus", "show", "--dropped", str(corpus), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["stage"] for row in rows] == ["length", "near"]
    assert main(["corpus", "show", "--dropped", str(corpus), "--stage", "near", "--reason", "dup"]) == 0
    line = capsys.readouterr().out
    assert rows[1]["id"] in line
    assert f"kept {rows[1]['kept']}" in line
    assert main(["corpus", "show", "--dropped", str(corpus), "--stage", "filter"]) == 0
    assert "stages that dropped documents: length, near" in capsys.readouterr().err
    assert main(["corpus", "show", "--dropped", str(corpus / "train")]) == 1
    assert "has no ledger.parquet" in capsys.readouterr().err


@pytest.mark.parametrize(("method", "left"), [("exact", 12), ("minhash", 11), ("substring", 12), ("paragraphs", 12)])
def test_shards_without_their_duplicates(
    method: str, left: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [prose(i) for i in range(11)]
    documents = [make_document(text, source=f"S{i % 2}", origin=f"d{i}") for i, text in enumerate(texts)]
    documents += [make_document(prose(3) + " more", source="S0", origin="near")]
    documents += [make_document(prose(4), source="S1", origin="copy")]
    with ShardFileWriter(tmp_path / "in.jsonl.zst") as shard:
        for document in documents:
            shard.write(document)
    out = tmp_path / "out"
    command = ["corpus", "dedup", str(tmp_path / "in.jsonl.zst"), "-o", str(out), "--method", method, "--workers", "1"]
    assert main(command) == 0
    assert f"13 documents in, {left} out" in capsys.readouterr().out
    kept = list(read_shards(out / "train"))
    assert len(kept) == left
    assert kept[:11] == documents[:11], "same ids, sources, meta and order"
    assert verify_corpus(out) == []
    before = (out / "train" / "00000.jsonl.zst").read_bytes()
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["documents"] == left
    assert (out / "train" / "00000.jsonl.zst").read_bytes() == before
    if method == "substring":
        assert kept[11].text == " more"
    assert main([*command[:3], "-o", str(tmp_path)]) == 2, "not into the folder of the input"


def test_a_classifier_is_trained_from_shards_and_says_how_good_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("good", "bad"):
        with ShardFileWriter(tmp_path / f"{kind}.jsonl.zst") as shard:
            for i in range(60):
                shard.write(make_document(f"{kind} {prose(i, 20)} {kind}", source=kind, origin=str(i)))
    model = tmp_path / "model"
    inputs = ["--good", str(tmp_path / "good.jsonl.zst"), "--bad", str(tmp_path / "bad.jsonl.zst")]
    assert main(["corpus", "classifier", *inputs, "-o", str(model), "--set", "bits=12"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["texts"] == 12
    assert figures["auc"] > 0.95
    assert model.exists()
