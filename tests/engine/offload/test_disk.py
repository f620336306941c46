"""Tensors in files are the tensors that were put there, and what a disk can do wrong is one clear error."""

from __future__ import annotations

import gc
import logging
import os
import resource
import threading
from pathlib import Path

import pytest
import torch

from piledriver.engine.offload.disk.block_file import DiskStore, Region
from piledriver.engine.offload.disk.direct_io import DirectIO, DiskRate
from piledriver.engine.offload.disk.errors import DiskError, DiskFullError
from piledriver.engine.offload.disk.host_buffer import HostBuffer
from piledriver.engine.offload.disk.opened_file import OpenedFile
from piledriver.engine.offload.disk.rate import measure_rate, warn_if_slow
from tests.patience import HANG_S


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_mapping_and_direct_transfers_see_the_same_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    store = DiskStore(tmp_path)
    first, value = store.put(torch.ones(5)), torch.randint(100, (333, 77)).to(dtype)
    kept = store.put(value)
    assert torch.equal(kept, value)
    region, buffer = store.region_of(kept), HostBuffer(kept.nbytes)
    for _ in range(3):
        kept.add_(1)
        value.add_(1)
        store.begin_read(region, buffer, 0).wait()
        came = buffer.tensor(0, tuple(kept.shape), dtype)
        assert torch.equal(came, value)
        came.mul_(2)
        value.mul_(2)
        store.begin_write(region, buffer, 0).wait()
        assert torch.equal(kept, value)
        store.settle()
        assert torch.equal(kept, value)
    assert torch.equal(first, torch.ones(5))
    assert store.find(value) is None
    assert store.find(kept[10:]) is not None


def test_parts_and_chunks_arrive_where_they_belong(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.io = DirectIO(3, chunk_bytes=4096)
    value = torch.arange(50_000, dtype=torch.int32)
    kept = store.put(value)
    region, buffer = store.region_of(kept), HostBuffer(kept.nbytes)
    store.begin_read(region.slice(8192, 16384), buffer, 4096).wait()
    assert torch.equal(buffer.tensor(4096, (4096,), torch.int32), value[2048 : 2048 + 4096])
    done: list[int] = []
    transfer = store.begin_write(region, buffer, 0)
    transfer.then(lambda: done.append(1))
    transfer.wait()
    transfer.then(lambda: done.append(2))
    assert done == [1, 2]


def test_the_page_cache_is_the_way_where_direct_transfers_are_rejected(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    kept = store.put(torch.arange(5000.0))
    file = store.files[0]
    plain = os.open(f"/proc/self/fd/{file.opened.descriptor}", os.O_RDWR)
    file.opened = OpenedFile(plain, False, str(tmp_path))
    store.write(kept, torch.arange(5000.0) * 2)
    buffer = HostBuffer(kept.nbytes)
    store.begin_read(store.region_of(kept), buffer, 0).wait()
    assert torch.equal(buffer.tensor(0, (5000,), torch.float32), torch.arange(5000.0) * 2)


def test_a_store_is_collected_before_its_transfers_are_done(tmp_path: Path) -> None:
    store, gate = DiskStore(tmp_path), threading.Event()
    store.io = DirectIO(1)
    region, buffer = store.region_of(store.put(torch.arange(5.0))), HostBuffer(4096)
    blocked = store.io._threads.submit(gate.wait, HANG_S)
    transfer = store.begin_write(region, buffer, 0)
    del store, region
    gc.collect()
    assert not blocked.done()
    gate.set()
    transfer.wait()


def test_no_file_has_a_name_and_none_outlives_the_store(tmp_path: Path) -> None:
    # What a killed process may have left is never opened.
    (tmp_path / ".piledriver-old.tier").write_bytes(b"stale")
    store = DiskStore(tmp_path)
    kept = store.put(torch.ones(1000))
    assert os.listdir(tmp_path) == [".piledriver-old.tier"]
    assert torch.equal(kept, torch.ones(1000))
    # A folder that vanishes takes nothing with it; only a new file needs it.
    (tmp_path / ".piledriver-old.tier").unlink()
    tmp_path.rmdir()
    store.settle()
    store.write(kept, torch.zeros(1000))
    assert torch.equal(kept, torch.zeros(1000))
    with pytest.raises(DiskError, match="name an existing, writable folder"):
        store.put(torch.ones(5000))


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(DiskFullError, match=r"2,097,152 bytes are needed, [\d,]+ are free"):
            store.reserve(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
    with pytest.raises(DiskFullError):
        DiskStore(tmp_path).reserve(1 << 60)


def test_a_transfer_that_fails_names_the_folder(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    kept = store.put(torch.ones(5000))
    region, buffer = store.region_of(kept), HostBuffer(1 << 16)
    with pytest.raises(DiskError, match=rf"{tmp_path} ends at 1,073,741,824, 8,192 bytes too early"):
        store.begin_read(Region(region.file, 1 << 30, 8192), buffer, 0).wait()
    full = OpenedFile(os.open("/dev/full", os.O_WRONLY), False, "/dev")
    with pytest.raises(DiskFullError, match="No space left"):
        store.io.write(full, 0, buffer.view[:4096]).wait()


def test_a_disk_far_behind_its_rate_is_a_warning_with_both(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rate = measure_rate(str(tmp_path), 1 << 20)
    assert rate.read > 0
    assert rate.write > 0
    expected = DiskRate(read=2e9, write=2e9)
    with caplog.at_level(logging.WARNING):
        assert not warn_if_slow("/nvme", 10**9, 1.0, expected)
        assert warn_if_slow("/nvme", 10**9, 10.0, expected)
    assert "/nvme: a step moved 1.00 GB at 0.100 GB/s; the folder did read 2.00 GB/s, write 2.00 GB/s" in caplog.text
