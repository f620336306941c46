"""The shell around every verb: help, exit codes, one-line errors, what is imported."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from piledriver.cli.main import VERBS, main, parse_command
from piledriver.cli.options.parser import Verbs
from piledriver.corpus.sources import SOURCES


def piledriver(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "piledriver.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["corpus", "--help"], ["corpus", "extract", "--help"], ["--version"]]
)
def test_help_and_corpus_never_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from piledriver.cli.main import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'pandas', 'transformers'} & set(sys.modules); "
        "print('heavy:', sorted(heavy)); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("heavy: []\n")


def test_importing_the_package_imports_no_torch() -> None:
    code = "import piledriver, sys; assert 'torch' not in sys.modules; print(piledriver.__version__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["crops"], "did you mean 'corpus'?"),
        (["corpus", "extrct"], "did you mean 'extract'?"),
        (["corpus", "extract"], "required"),
        (["corpus", "extract", "txt2", "x", "-o", "y.jsonl.zst"], "unknown source"),
        (["corpus", "extract", "text", "x", "-o", "y.jsonl.zst", "--workers", "0"], "positive"),
        (["env", "--jsn"], "--jsn; did you mean --json?"),
        (["corpus", "show", "x", "--limt=3"], "did you mean --limit?"),
        (["trace", "run", "--stp", "3", "--step", "3"], "did you mean --step?"),
        (["env", "more"], "unrecognized arguments: more"),
        (["corpus"], "no command is given"),
        (["corpus", "build", "x", "-o", "y", "--kys"], "did you mean --keys?"),
        (["--debg"], "did you mean --debug?"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = piledriver(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_other_errors_are_one_line_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text("not json\n")
    done = piledriver("corpus", "show", "broken.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert "broken.jsonl: document 0" in done.stderr
    assert "Fix:" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" in piledriver("corpus", "show", "broken.jsonl", "--debug", cwd=tmp_path).stderr


def verbs(group: Verbs = VERBS, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every verb with the words that name it."""
    found: list[tuple[str, ...]] = []
    for name, (module, _) in group.items():
        inner = getattr(importlib.import_module(module), "VERBS", None)
        found += verbs(inner, (*above, name)) if inner else [(*above, name)]
    return found


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_the_help_of_every_verb_has_an_example_that_parses(
    verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb, "--help"]) == 0
    example = capsys.readouterr().out.splitlines()[-1].split()
    assert example[: len(verb) + 1] == ["piledriver", *verb]
    parse_command(example[1:])


def test_the_command_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    alone = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == alone
    for verb in VERBS:
        assert f"\n  {verb} " in alone


def test_a_table_in_a_pipe_has_one_line_per_source(tmp_path: Path) -> None:
    lines = piledriver("corpus", "sources", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(SOURCES)


@pytest.mark.slow
def test_env_says_what_was_detected_and_why() -> None:
    facts = json.loads(piledriver("env", "--json").stdout)
    assert facts["versions"]["torch"][0].isdigit()
    assert "(" in facts["accelerator"]["device"] or facts["accelerator"]["device"] != "cpu"


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize("reader", ["head -1", "true"])
@pytest.mark.parametrize("verb", ["corpus show many.jsonl --limit 20000", "corpus show many.jsonl", "--help"])
def test_a_reader_that_leaves_is_no_error(verb: str, reader: str, tmp_path: Path) -> None:
    """Also where all of the output fits the buffer, and is written when the verb has ended."""
    (tmp_path / "many.jsonl").write_text('{"text": "hello"}\n' * 20_000)
    command = f"{sys.executable} -m piledriver.cli.main {verb} | {reader}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=BUFFERED,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
@pytest.mark.parametrize("environment", [BUFFERED, {**BUFFERED, "PYTHONUNBUFFERED": "1"}])
def test_an_output_that_cannot_be_written_is_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"text": "hello"}\n')
    command = [sys.executable, "-m", "piledriver.cli.main", "corpus", "show", "one.jsonl"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment
        )
    assert done.returncode == 1
    assert done.stderr == "piledriver: error: No space left on device. Fix: free some disk space and run it again\n"


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_half_written_and_says_how_to_go_on(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    for i in range(4000):
        (raw / f"{i}.txt").write_text(f"document {i}\n" * 2000)
    command = [sys.executable, "-m", "piledriver.cli.main", "corpus", "extract", "text", "raw", "-o", "out/o.jsonl.zst"]
    options = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    # A suite that runs in the background has the signal ignored, and children inherit that.
    with subprocess.Popen(
        command, **options, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    ) as process:
        while not (tmp_path / "out").exists():
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130
    assert "Run the same command again to resume" in said
    assert os.listdir(tmp_path / "out") == []


def test_text_goes_out_whole_where_the_locale_has_no_letters_for_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("naïve 日本語", encoding="utf-8")
    piledriver("corpus", "extract", "text", "a.txt", "-o", "a.jsonl.zst", cwd=tmp_path)
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "piledriver.cli.main", "corpus", "show", "a.jsonl.zst"]
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path, env=plain)
    assert done.returncode == 0, done.stderr
    assert "naïve 日本語" in done.stdout.decode()
