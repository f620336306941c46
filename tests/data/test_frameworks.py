"""The documented lines for other frameworks, run as they stand in the docs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def documented(heading: str) -> str:
    block = re.search(rf"### {heading}\n\n```python\n(.*?)```", DOCS, re.S)
    assert block, heading
    assert len([line for line in block.group(1).splitlines() if line]) <= 5
    return block.group(1)


def run_documented(heading: str, tokens_folder: Path) -> dict[str, object]:
    names: dict[str, object] = {"TOKENS": str(tokens_folder), "NAME": "00000-000"}
    exec(documented(heading), names)
    return names


def run_apart(heading: str, tokens_folder: Path, result: str) -> object:
    """Run the lines in a process of their own: these libraries start threads that later forks trip over."""
    script = f"TOKENS, NAME = {str(tokens_folder)!r}, '00000-000'\n{documented(heading)}\nprint('\\n' + repr({result}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def shard(tokens_folder):
    tokens = np.load(tokens_folder / "00000-000.tokens.npy")
    starts = np.load(tokens_folder / "00000-000.starts.npy")
    return tokens, starts


def test_numpy(tokens_folder, shard):
    tokens, starts = shard
    np.testing.assert_array_equal(run_documented("numpy", tokens_folder)["document"], tokens[starts[3] + 1 : starts[4]])


def test_torch(tokens_folder, shard):
    batch = run_documented("torch", tokens_folder)["batch"]
    assert batch.shape == (4, 128)
    windows = {row.tobytes() for row in shard[0][: len(shard[0]) // 128 * 128].reshape(-1, 128)}
    assert all(row.numpy().astype(np.uint16).tobytes() in windows for row in batch)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
def test_datasets(tokens_folder, shard):
    tokens, starts = shard
    assert run_apart("datasets", tokens_folder, "first") == tokens[1 : starts[1]].tolist()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
def test_jax(tokens_folder):
    assert run_apart("JAX", tokens_folder, "tuple(batch.shape)") == (4, 128)


def test_tensorflow_reads_fixed_records_after_the_header(tokens_folder, shard):
    """What the documented call does, without TensorFlow."""
    assert "header_bytes=128" in documented("TensorFlow")
    content = (tokens_folder / "00000-000.tokens.npy").read_bytes()
    np.testing.assert_array_equal(np.frombuffer(content[128 : 128 + 256], "<u2"), shard[0][:128])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="tensorflow is not installed")
def test_tensorflow(tokens_folder):
    assert run_apart("TensorFlow", tokens_folder, "tuple(batch.shape)") == (4, 128)


def test_the_first_example(tokens_folder):
    block = re.search(r"```python\n(from piledriver\.data import StreamConfig.*?)```", DOCS, re.S)
    names: dict[str, object] = {}
    exec(block.group(1).replace('"TOKENS"', repr(str(tokens_folder))).replace("2048", "64"), names)
    assert names["batch"].inputs.shape == (8, 64)
