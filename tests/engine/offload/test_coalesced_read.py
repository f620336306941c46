"""Tensors that are read together are the tensors of the file, whatever their offsets, sizes and order."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from piledriver.engine.offload.disk import opened_file
from piledriver.engine.offload.disk.coalesced_read import read_coalesced
from piledriver.engine.offload.disk.direct_io import DirectIO
from piledriver.engine.offload.disk.extents import Extent, safetensors_extents
from piledriver.engine.offload.disk.page_cache import is_cached
from piledriver.engine.offload.disk.reader import DirectReader


@pytest.fixture
def files(tmp_path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Extent]]:
    tensors = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.0),
        "odd": torch.arange(7, dtype=torch.uint8),
        **{f"large {i}": torch.randn(150, 333) for i in range(4)},
        **{f"half {i}": torch.randn(40_001).bfloat16() for i in range(3)},
    }
    names = list(tensors)
    save_file({name: tensors[name] for name in names[::2]}, tmp_path / "a.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, tmp_path / "b.safetensors")
    found = safetensors_extents(tmp_path / "a.safetensors") | safetensors_extents(tmp_path / "b.safetensors")
    return tensors, {name: found[name] for name in names}


@pytest.mark.parametrize("ahead", [None, 0, 1])
@pytest.mark.parametrize("run_bytes", [1, 300_000, 1 << 30])
def test_runs_give_every_tensor(files, run_bytes: int, ahead: int | None) -> None:
    tensors, extents = files
    with DirectReader(DirectIO(3, chunk_bytes=8192)) as reader:
        read = dict(read_coalesced(reader, extents, run_bytes=run_bytes, ahead=ahead))
        reader.io.close()
    gc.collect()
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    read["large 0"].fill_(0)
    assert torch.equal(read["large 1"], tensors["large 1"])
    assert read["large 1"].untyped_storage().nbytes() == tensors["large 1"].nbytes


def test_an_offset_within_an_element(tmp_path: Path) -> None:
    value = torch.randn(50_000)
    (tmp_path / "file").write_bytes(b"abc" + value.numpy().tobytes())
    with DirectReader() as reader:
        [(_, read)] = read_coalesced(reader, {0: Extent(str(tmp_path / "file"), 3, torch.float32, (50_000,))})
    assert torch.equal(read, value)


def test_what_the_page_cache_holds_is_read_from_it(files, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, extents = files
    path = extents["large 0"].path
    size = os.stat(path).st_size
    asked = []

    def answer(descriptor: int, offset: int, nbytes: int) -> bool:
        asked.append(descriptor)
        return True

    monkeypatch.setattr(opened_file, "is_cached", answer)
    with DirectReader() as reader:
        assert all(torch.equal(value, tensors[name]) for name, value in read_coalesced(reader, extents))
    opened = len(asked)
    with DirectReader(reads_cached=False) as reader:
        assert all(torch.equal(value, tensors[name]) for name, value in read_coalesced(reader, extents))
    assert len(asked) == opened
    with open(path, "rb") as file:
        file.read()
        assert is_cached(file.fileno(), 0, size) in (True, False)
    assert not is_cached(-1, 0, size)
