"""The plan before anything runs, and the report after: sizes that are those of the files, intervals, reasons."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from piledriver import compress
from piledriver.cli.main import main
from piledriver.compress.folders import QuantiseConfig, quantise_folder
from piledriver.compress.forecast import narrower_shape
from piledriver.compress.measure import paired_change
from piledriver.core.errors import UsageError
from piledriver.data import StreamConfig, TokenizerTraining, train_tokenizer
from piledriver.data.tokens.token_set import TokenizerMismatchError
from piledriver.evaluate import DocumentScore
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import copy_model_files, load_folder, save_folder
from tests.train.corpus import make_tokens

SHAPE = ModelConfig(vocab_size=512, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=128, max_positions=64)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    make_tokens(folder, documents=30)
    (folder / "dense").mkdir()
    (folder / "dense" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    save_folder(Transformer(SHAPE), folder / "dense")
    small = compress.quantise(load_folder(folder / "dense"), "w4a16-g32", skip=["blocks.0.mlp.down"])
    (folder / "small").mkdir()
    copy_model_files(folder / "dense", folder / "small")
    save_folder(small, folder / "small")
    return folder


class Tags(HTMLParser):
    """Counts tags, and notes what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.fetched = 0, list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tables += tag == "table"
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_report_has_size_bits_speed_errors_and_reasons(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"models=[{place / 'dense'},{place / 'small'}]", f"corpus={place / 'clean.jsonl.zst'}"]
    assert main(["compress", "report", *words, f"out={place / 'report'}", "documents=6", "device=cpu"]) == 0
    assert "small" in capsys.readouterr().out
    report = json.loads((place / "report" / "report.json").read_text())
    dense, small = report["models"]
    assert (report["documents"], dense["change"]) == (6, None)
    assert small["bytes"] == (place / "small" / "model.safetensors").stat().st_size < dense["bytes"]
    assert set(small["bits_per_byte"]) == {"A", "B", "all"}
    low, middle, high = (small["bits_per_byte"]["all"][name] for name in ("low", "bits_per_byte", "high"))
    assert low < middle < high
    assert small["change"][1] <= small["change"][0] <= small["change"][2]
    assert set(small["tokens_per_second"]) == {"1", "32"}
    assert all(rate > 0 for rate in small["tokens_per_second"].values())
    assert small["records"][0]["skipped"] == {"blocks.0.mlp.down": "matches blocks.0.mlp.down"}
    tags = Tags()
    text = (place / "report" / "report.html").read_text()
    tags.feed(text)
    assert (tags.fetched, tags.tables >= 4) == ([], True)
    assert "matches blocks.0.mlp.down" in text
    assert "blocks.1.attention.qkv" in text


@pytest.mark.parametrize(
    ("tied", "scheme", "ends"),
    [
        (True, "w4a16-g32", {}),
        (True, "w8a16", {"embedding": "fp8"}),
        (False, "w4a16-g32", {"head": "int8"}),
        (False, "w8a16", {"head": "int8", "embedding": "fp8"}),
    ],
)
def test_the_plan_predicts_the_bytes_of_the_files(
    tied: bool, scheme: str, ends: dict[str, Any], tmp_path: Path
) -> None:
    model = Transformer(replace(SHAPE, tied=tied, dim=128, mlp_dim=256)).to(torch.bfloat16)
    plan = compress.plan(model, scheme, hardware="1xh100-80g", **ends)
    save_folder(compress.quantise(model, scheme, **ends), tmp_path)
    written = (tmp_path / "model.safetensors").stat().st_size
    header = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") + 8
    assert plan.after.weight_bytes == pytest.approx(written - header, rel=0.03)
    assert plan.before.weight_bytes == pytest.approx(2 * plan.before.parameters, rel=1e-3)


def test_a_plan_is_what_prune_does(place: Path) -> None:
    model = load_folder(place / "dense")
    plan = compress.plan(model, "params:0.7+w8a16", hardware="1xh100-80g")
    small = compress.prune(model, plan, data=torch.randint(512, (4, 16)))
    assert small.config == plan.config
    assert sum(p.numel() for p in small.parameters()) == plan.after.parameters
    blocks = [sum(p.numel() for p in one.blocks.parameters()) for one in (small, model)]
    assert 0.55 < blocks[0] / blocks[1] <= 0.7
    assert plan.after.tokens_per_second[1] > plan.before.tokens_per_second[1]
    assert "keeps kv_heads" in plan.as_text() or "keeps mlp_dim" in plan.as_text()
    assert json.loads(json.dumps(plan.as_json()))["scheme"] == "w8a16"


def test_wrong_plans_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["tiny", "w3a16"], ["tiny", "params:0.01"], ["tiny", "params:7"], ["tiny", "w8a16", "--length=-5"]):
        assert main(["compress", "plan", *words, "--hardware", "1xh100-80g"]) != 0
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["compress", "plan", "llama-3-8b", "w4a16-g128", "--hardware", "1xh100-80g"]) == 0
    assert "weights (MB)" in capsys.readouterr().out
    with pytest.raises(UsageError, match="removes nothing"):
        compress.prune(Transformer(SHAPE), compress.plan(SHAPE, "w8a16", hardware="1xh100-80g"))


def test_shares_of_parameters_are_kept_to() -> None:
    for share in (0.9, 0.75, 0.5):
        shape = narrower_shape(ModelConfig(vocab_size=32, dim=256, layers=2, heads=8, mlp_dim=1024), share)
        assert shape.mlp_dim is not None
        assert shape.mlp_dim < 1024


def test_each_model_is_measured_with_its_own_tokenizer_and_listed(place: Path, tmp_path: Path) -> None:
    corpus = place / "clean.jsonl.zst"
    other = train_tokenizer(corpus, TokenizerTraining(vocab_size=300))
    for name in ("a/small", "b/small"):
        (tmp_path / name).mkdir(parents=True)
        save_folder(load_folder(place / "dense"), tmp_path / name)
    (tmp_path / "a" / "small" / "tokenizer.json").write_bytes(other.content)
    folders = [str(place / "dense"), str(tmp_path / "a" / "small"), str(tmp_path / "b" / "small")]
    report = compress.report(folders, str(corpus), documents=2, device="cpu", speed=False)
    dense, own, without = (row["bits_per_byte"]["all"]["bits_per_byte"] for row in report["models"])
    assert dense == without != own
    alone = compress.report(folders[:1], str(corpus), documents=2, device="cpu", speed=False, tokenizer=other)
    assert alone["models"][0]["bits_per_byte"]["all"]["bits_per_byte"] == own


def test_calibration_text_of_another_tokenizer_is_refused(place: Path, tmp_path: Path) -> None:
    other = train_tokenizer(place / "clean.jsonl.zst", TokenizerTraining(vocab_size=300))
    save_folder(load_folder(place / "dense"), tmp_path / "model")
    data = StreamConfig(tokens=str(place / "tokens"), seq_len=16)
    config = QuantiseConfig(
        model=str(tmp_path / "model"), out=str(tmp_path / "q"), scheme="w8a16", data=data, samples=10**9
    )
    assert quantise_folder(config)["calibration"]["samples"] < 10**5  # no more windows than there are
    with pytest.raises(UsageError, match="an epoch has"):
        quantise_folder(replace(config, start=10**30))
    (tmp_path / "model" / "tokenizer.json").write_bytes(other.content)
    with pytest.raises(TokenizerMismatchError, match="another tokenizer"):
        quantise_folder(config)


def test_the_interval_of_a_paired_change_holds() -> None:
    """Of many experiments, about 95% of the intervals hold the true change."""
    make = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(200):
        sizes = torch.rand(40, generator=make) * 100 + 10
        noise = 1.02 + 0.05 * torch.randn(40, generator=make)
        one = [DocumentScore(i, "", float(size), 1, 1, 1) for i, size in enumerate(sizes)]
        two = [DocumentScore(i, "", float(size), 1, 1, 1) for i, size in enumerate(sizes * noise)]
        change, low, high = paired_change(one, two)
        assert low < change < high
        held += low <= 0.02 <= high
    assert 180 <= held <= 198
    with pytest.raises(UsageError, match="different documents"):
        paired_change(one, two[1:])


def test_compression_needs_no_package_of_text_shards() -> None:
    code = "import sys; sys.modules['msgspec'] = None; import piledriver.compress"
    subprocess.run([sys.executable, "-c", code], check=True)
