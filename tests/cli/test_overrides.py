"""What of a command line is the file and what changes its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from piledriver.cli.main import parse_command

KEYS = ["model=tiny", "optimizer.lr=1e-3"]


@pytest.mark.parametrize(
    ("given", "file", "overrides"),
    [
        ([], None, []),
        (["run.yaml"], "run.yaml", []),
        (["run.yaml", *KEYS], "run.yaml", KEYS),
        ([KEYS[0], "--json", KEYS[1]], None, KEYS),
        (["--validation-documents", "3", *KEYS], None, KEYS),
        (["lr=1.yaml", *KEYS], "lr=1.yaml", KEYS),
        (["lr=2.yaml", *KEYS], None, ["lr=2.yaml", *KEYS]),
    ],
)
def test_the_file_may_be_left_out(
    given: list[str], file: str | None, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1.yaml").touch()  # a name with a "=" is a file where there is one
    found = parse_command(["train", *given])
    assert (found.config, found.overrides) == (file, overrides)


@pytest.mark.parametrize(
    ("given", "rest"),
    [
        (["run", "--steps", "2", *KEYS, "-o", "there"], KEYS),
        (["train.py", "--steps", "2", "-o", "there", "--", "--steps", "9"], ["--steps", "9"]),
    ],
)
def test_a_profile_takes_changes_after_its_options(given: list[str], rest: list[str]) -> None:
    found = parse_command(["profile", *given])
    assert (found.target, found.steps, found.out, found.overrides) == (given[0], 2, "there", rest)
