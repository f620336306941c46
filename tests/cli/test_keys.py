"""What can be named in a config: every key has a type, a default and help, and the reference lists all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piledriver.cli.main import main
from piledriver.cli.reference import config_reference

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "config.md"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "key"),
    [
        (["train"], {"name": "spikes.action", "default": "skip", "choices": ["log", "skip", "rollback", "stop"]}),
        (["train"], {"name": "layout.zero", "choices": [0, 1, 2, 3]}),
        (["train"], {"name": "data.tokens", "type": "str | null", "required": False}),
        (["train"], {"name": "batch_tokens", "type": "int", "required": True, "default": None}),
        (["corpus", "build"], {"name": "sources.N.paths", "type": "list[str]", "required": True}),
        (["corpus", "build"], {"name": "splits.validation", "type": "float", "default": 0.001}),
    ],
)
def test_keys_are_listed_with_help(verb: list[str], key: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    keys = {found["name"]: found for found in json.loads(printed(capsys, *verb, "--keys", "--json"))}
    assert [name for name, found in keys.items() if not found["help"]] == []
    assert keys[str(key["name"])].items() >= key.items()
    assert f"\n{key['name']}: " in printed(capsys, *verb, "--keys")


def test_filters_and_stages_are_listed_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    stages = {stage["name"]: stage for stage in json.loads(printed(capsys, "corpus", "filters", "--json"))}
    assert {"length", "exact", "near", "decontaminate"} <= stages.keys()
    for name, stage in stages.items():
        assert stage["help"], name
        assert [key["name"] for key in stage["settings"] if not key["help"]] == [], name
    assert "min_characters: int = 1" in printed(capsys, "corpus", "filters", "length")
    assert main(["corpus", "filters", "lenght"]) == 2
    assert "did you mean 'length'?" in capsys.readouterr().err


def test_presets_are_listed_with_their_size(capsys: pytest.CaptureFixture[str]) -> None:
    presets = {row["preset"]: row for row in json.loads(printed(capsys, "presets", "--json"))}
    assert presets["gpt2"]["parameters"] == 124_439_808
    assert "124.4M" in printed(capsys, "presets")


def test_the_reference_is_up_to_date() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == config_reference(), "run 'make reference'"
