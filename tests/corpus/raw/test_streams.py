"""Raw files from strangers: archives in archives, compressions, and everything hostile refused with its reason."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zipfile
from pathlib import Path

import py7zr
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from piledriver.core.errors import UsageError
from piledriver.corpus.document import Refusal
from piledriver.corpus.raw import limits, streams
from piledriver.corpus.raw.streams import FileRange, decompressed, raw_streams
from piledriver.corpus.sources.base import ends_with


def tar_of(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def read(path: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    found, refused = {}, {}
    for item in raw_streams([str(path)], ends_with(".txt")):
        if isinstance(item, Refusal):
            refused[item.origin] = item.reason
        else:
            found[item.origin] = item.file.read()
    return found, refused


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zstandard.ZstdCompressor().compress])
def test_one_layer_of_compression_is_taken_off(compress: object, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(compress(b"hello"))  # type: ignore[operator]
    assert read(tmp_path / "a.txt")[0] == {"a.txt": b"hello"}


def test_folders_and_archives_in_archives_are_one_sequence(tmp_path: Path) -> None:
    inner = tar_of({"deep/c.txt": b"c", "skip.bin": b"?"})
    (tmp_path / "b.tar.gz").write_bytes(tar_of({"inner.tar": gzip.decompress(inner), "b.txt.gz": gzip.compress(b"b")}))
    (tmp_path / "z.zip").write_bytes(zip_of({"z.txt": b"z", "more.tgz": inner}))
    (tmp_path / "a.txt").write_bytes(b"a")
    with py7zr.SevenZipFile(tmp_path / "s.7z", "w") as archive:
        archive.writestr(b"first" * 100_000, "one.txt")
        archive.writestr(b"skipped", "two.bin")
        archive.writestr(b"third", "three.txt")
    found, refused = read(tmp_path)
    base = tmp_path.name
    assert {origin.removeprefix(base + "/"): content for origin, content in found.items()} == {
        "a.txt": b"a", "b.tar.gz!inner.tar!deep/c.txt": b"c", "b.tar.gz!b.txt.gz": b"b",
        "s.7z!one.txt": b"first" * 100_000, "s.7z!three.txt": b"third",
        "z.zip!z.txt": b"z", "z.zip!more.tgz!deep/c.txt": b"c",
    }  # fmt: skip
    assert refused == {}


def test_links_devices_and_climbing_names_are_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind in (("link.txt", tarfile.SYMTYPE), ("hard.txt", tarfile.LNKTYPE), ("dev.txt", tarfile.CHRTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
        for name in ("../up.txt", "/abs.txt", "good.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = 1
            archive.addfile(entry, io.BytesIO(b"x"))
    (tmp_path / "evil.tar").write_bytes(buffer.getvalue())
    (tmp_path / "evil.zip").write_bytes(zip_of({"..\\up.txt": b"x", "good.txt": b"x"}))
    os.symlink("/etc/passwd", tmp_path / "passwd.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    found, refused = read(tmp_path)
    assert sorted(origin.rsplit("/", 1)[-1] for origin in found) == ["evil.tar!good.txt", "evil.zip!good.txt"]
    assert sorted(refused.values()) == ["not a regular file"] * 3 + ["unsafe member name"] * 3
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        list(raw_streams([str(tmp_path / "pipe.txt")], ends_with(".txt")))


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EXPANSION_GRACE_BYTES", 1 << 16)
    monkeypatch.setattr(limits, "MAX_EXPANSION", 100)
    zeros = bytes(20 << 20)
    with pytest.raises(limits.CompressionBombError):
        decompressed(io.BytesIO(gzip.compress(zeros)), "bomb.gz").read()
    (tmp_path / "bomb.zip").write_bytes(zip_of({"bomb.txt": zeros, "good.txt": b"x"}))
    found, refused = read(tmp_path)
    assert list(found.values()) == [b"x"]
    assert list(refused.values()) == ["compression bomb"]


def test_archives_nested_without_end_are_refused(tmp_path: Path) -> None:
    content = zip_of({"a.txt": b"x"})
    for _ in range(10):
        content = zip_of({"inner.zip": content})
    (tmp_path / "deep.zip").write_bytes(content)
    found, refused = read(tmp_path)
    assert found == {}
    assert list(refused.values()) == ["archives nested too deeply"]


@pytest.mark.parametrize("name", ["t.tar.gz", "t.zip", "t.7z"])
def test_a_cut_archive_gives_what_came_before_and_a_reason(name: str, tmp_path: Path) -> None:
    files = {f"{i}.txt": os.urandom(5000) for i in range(20)}
    if name.endswith("7z"):
        with py7zr.SevenZipFile(tmp_path / name, "w") as archive:
            for member, content in files.items():
                archive.writestr(content, member)
        whole = (tmp_path / name).read_bytes()
    else:
        whole = tar_of(files) if "tar" in name else zip_of(files)
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    refusals, found = [], {}
    for item in raw_streams([str(tmp_path)], ends_with(".txt")):
        if isinstance(item, Refusal):
            refusals.append(item.reason)
            continue
        try:
            found[item.name] = item.file.read()
        except (EOFError, OSError):
            refusals.append("while reading")
    assert refusals
    assert all(files[member] == content for member, content in found.items() if len(content) == 5000)


@given(
    content=st.binary(max_size=300),
    head=st.sampled_from([b"", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"]),
)
def test_arbitrary_bytes_never_escape_as_a_crash(
    content: bytes, head: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("a.tar", "a.tgz", "a.zip", "a.7z"):
        (folder / name).write_bytes(head + content)
    for item in raw_streams([str(folder)], ends_with(".txt")):
        assert isinstance(item, Refusal) or item.name.endswith(".txt")


def test_a_file_range_is_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    part = FileRange(str(tmp_path / "f"), 2, 5)
    assert part.read(2) == b"23"
    assert part.tell() == 2
    assert part.read() == b"456"
    assert part.seek(-1, io.SEEK_END) == 4
    assert part.read(100) == b"6"
    assert part.seek(0) == 0
    assert part.read() == b"23456"


def test_a_file_that_cannot_be_opened_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zip").write_bytes(zip_of({"a.txt": b"a"}))
    (tmp_path / "b.zip").write_bytes(zip_of({"b.txt": b"b"}))
    real = open

    def refusing(path: str, mode: str = "rb") -> object:
        if path.endswith("a.zip"):
            raise PermissionError(f"no permission for {path}")
        return real(path, mode)

    monkeypatch.setattr(streams, "open", refusing, raising=False)
    found, refused = read(tmp_path)
    assert list(found.values()) == [b"b"]
    assert list(refused.values()) == ["unreadable file"]
