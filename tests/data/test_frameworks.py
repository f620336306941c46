"""The documented lines for other frameworks, run as they stand in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def run_documented(heading: str, tokens_folder: Path) -> dict[str, object]:
    block = re.search(rf"### {heading}\n\n```python\n(.*?)```", DOCS, re.S)
    assert block, heading
    assert len(block.group(1).splitlines()) <= 5
    names: dict[str, object] = {"TOKENS": str(tokens_folder), "NAME": "00000-000"}
    exec(block.group(1), names)
    return names


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


@pytest.mark.filterwarnings("ignore")
def test_datasets(tokens_folder, shard):
    pytest.importorskip("datasets")
    tokens, starts = shard
    assert run_documented("datasets", tokens_folder)["first"] == tokens[1 : starts[1]].tolist()


def test_jax(tokens_folder):
    pytest.importorskip("jax")
    batch = run_documented("JAX", tokens_folder)["batch"]
    assert batch.shape == (4, 128)


def test_tensorflow(tokens_folder, shard):
    """The documented call reads fixed records after a header: read the same way, without TensorFlow too."""
    content = (tokens_folder / "00000-000.tokens.npy").read_bytes()
    np.testing.assert_array_equal(np.frombuffer(content[128 : 128 + 256], "<u2"), shard[0][:128])
    pytest.importorskip("tensorflow")
    assert run_documented("TensorFlow", tokens_folder)["batch"].shape == (4, 128)


def test_the_first_example(tokens_folder):
    block = re.search(r"```python\n(from piledriver\.data import StreamConfig.*?)```", DOCS, re.S)
    names: dict[str, object] = {}
    exec(block.group(1).replace('"TOKENS"', repr(str(tokens_folder))).replace("2048", "64"), names)
    assert names["batch"].inputs.shape == (8, 64)
