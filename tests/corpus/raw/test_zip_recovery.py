"""Members of zip archives that were cut before their directory."""

from __future__ import annotations

import io
import zipfile

import pytest

from piledriver.corpus.raw.zip_recovery import EncryptedMemberError, recovered_members

FILES = {f"{number}.txt": (f"line of {number}\n" * 50 * number).encode() for number in range(1, 6)}


class _Pipe(io.RawIOBase):
    """A file without `seek`: `zipfile` then writes sizes behind each member."""

    def __init__(self) -> None:
        self.content = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self.content += bytes(data)
        return len(data)


def archive(method: int, *, sizes_follow: bool = False) -> bytes:
    pipe, buffer = _Pipe(), io.BytesIO()
    with zipfile.ZipFile(pipe if sizes_follow else buffer, "w", method) as writer:
        for name, content in FILES.items():
            writer.writestr(name, content)
    return pipe.content or buffer.getvalue()


def recovered(content: bytes) -> dict[str, bytes]:
    found = {}
    for name, file in recovered_members(io.BytesIO(content)):
        try:
            content = file.read()
            if not file.read(1):
                found[name] = content
        except OSError:
            continue
    return found


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("sizes_follow", [False, True])
def test_every_member_before_the_cut_is_read(method: int, sizes_follow: bool) -> None:
    if method == zipfile.ZIP_STORED and sizes_follow:
        pytest.skip("the end of a stored member is not known then")
    whole = archive(method, sizes_follow=sizes_follow)
    offsets = [info.header_offset for info in zipfile.ZipFile(io.BytesIO(whole)).infolist()]
    for cut in range(0, len(whole), 37):
        found = recovered(whole[:cut])
        assert all(FILES[name] == content for name, content in found.items())
        # The header of the next member proves the end of the one before.
        assert len(found) >= sum(offset + 30 <= cut for offset in offsets[1:])


def test_recovery_ends_at_an_encrypted_or_damaged_member() -> None:
    whole = archive(zipfile.ZIP_DEFLATED)
    third = zipfile.ZipFile(io.BytesIO(whole)).getinfo("3.txt").header_offset
    encrypted = bytearray(whole)
    encrypted[third + 6] |= 1
    with pytest.raises(EncryptedMemberError):
        recovered(bytes(encrypted))
    damaged = bytearray(whole)
    damaged[third + 14] ^= 0xFF
    members = recovered_members(io.BytesIO(bytes(damaged)))
    assert [next(members)[0] for _ in range(3)] == ["1.txt", "2.txt", "3.txt"]
    with pytest.raises(OSError, match="CRC32"):
        next(members)
