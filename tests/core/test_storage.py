from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, StorageError

OLD, NEW = b"old" * 1000, b"new" * 100_000


@pytest.mark.parametrize("base", ["local", "memory://atomic"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(base: str, tmp_path: Path) -> None:
    folder = str(tmp_path) if base == "local" else base
    target = storage.join(folder, "a", "file.bin")
    storage.write_bytes(target, OLD)
    with pytest.raises(RuntimeError, match="half way"), storage.atomic_write(target) as file:
        file.write(NEW)
        raise RuntimeError("half way")
    assert storage.read_bytes(target) == OLD
    assert len(storage.files_below(folder)) == 1
    storage.write_bytes(target, NEW)
    assert storage.read_bytes(target) == NEW
    assert storage.size(target) == len(NEW)
    storage.remove_file(target)
    assert not storage.exists(target)


_WRITER = """
import os, sys
from piledriver.core import storage
real = os.replace
def stopped(*a):
    print("at the rename", flush=True)
    sys.stdin.readline()
    real(*a)
os.replace = stopped
with storage.atomic_write(sys.argv[1]) as file:
    for _ in range(100):
        file.write(b"new" * 1000)
        if sys.argv[2] == "write": print("writing", flush=True); sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["write", "rename"])
def test_kill_9_in_a_write_leaves_the_old_file_whole(moment: str, tmp_path: Path) -> None:
    target = tmp_path / "file.bin"
    target.write_bytes(OLD)
    command = [sys.executable, "-c", _WRITER, str(target), moment]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    assert target.read_bytes() == OLD
    assert storage.files_below(tmp_path) == [str(target)], "what the dead writer left is not taken for a file"
    storage.write_bytes(target, NEW)
    assert target.read_bytes() == NEW


_FULL = """
import resource, signal, sys
from piledriver.core import storage
from piledriver.core.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    storage.write_bytes(sys.argv[1], b"x" * 1_000_000)
except StorageError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file.bin"
    target.write_bytes(OLD)
    said = subprocess.run([sys.executable, "-c", _FULL, str(target)], capture_output=True, text=True, check=True).stdout
    assert "cannot write" in said
    assert str(target) in said
    assert "Fix:" in said
    assert target.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file.bin"]


def test_errors_name_the_file_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere.*check the path"):
        storage.read_bytes(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="not a folder"):
        storage.read_bytes(tmp_path)
    with pytest.raises(StorageError, match="install the fsspec package"):
        storage.read_bytes("nosuchscheme://x/y")
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(StorageError, match=r"latin.*UTF-8"):
        storage.read_text(tmp_path / "latin")
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(
        CorruptFileError, match=r"config\.json is damaged: byte 7 is not UTF-8.*the command that wrote it"
    ):
        storage.read_text(tmp_path / "config.json")


def test_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3_000_000))
    said = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True).stdout
    assert storage.sha256(path) == said.split()[0]


def test_a_file_where_a_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for act in (storage.make_folder, storage.require_writable, lambda path: storage.write_text(path / "below", "")):
        with pytest.raises(StorageError, match=r"cannot write .*file.*Fix: a part of the path is a file"):
            act(tmp_path / "file")


def test_a_folder_that_may_not_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    assert storage.files_below(tmp_path / "absent") == []
    (tmp_path / "closed").mkdir(mode=0)
    if os.access(tmp_path / "closed", os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(StorageError, match=r"cannot read .*closed: Permission denied"):
        storage.files_below(tmp_path)
