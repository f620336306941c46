"""gzip: the same as the standard library where all is well; up to the byte where it is not."""

from __future__ import annotations

import gzip
import io
import random
import zlib

from hypothesis import given
from hypothesis import strategies as st

from piledriver.corpus.raw.gzip import GzipReader
from tests.corpus.fuzz.seeds import tarred
from tests.corpus.sources.extracting import extract_bytes


def unpacked(content: bytes, size: int = 1 << 16) -> tuple[bytes, Exception | None]:
    reader, parts = GzipReader(io.BytesIO(content)), b""
    try:
        while block := reader.read1(size):
            parts += block
    except (zlib.error, EOFError) as error:
        return parts, error
    return parts, None


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4), st.integers(1, 300), st.integers(0, 600))
def test_members_and_padding(members: list[bytes], size: int, padding: int) -> None:
    packed = b"".join(map(gzip.compress, members)) + bytes(padding)
    assert unpacked(packed, size) == (b"".join(members), None)


@given(st.binary(min_size=1, max_size=400), st.data())
def test_what_stands_before_a_cut_comes_and_the_cut_is_raised(content: bytes, data: st.DataObject) -> None:
    packed = gzip.compress(content)
    cut = packed[: data.draw(st.integers(1, len(packed) - 1))]
    found, error = unpacked(cut)
    assert content.startswith(found)
    assert found == zlib.decompressobj(31).decompress(cut)
    assert isinstance(error, EOFError)


def test_files_before_a_damaged_byte_come() -> None:
    luck = random.Random(3)
    files = {f"{n:03d}.txt": " ".join(str(luck.random()) for _ in range(100)).encode() for n in range(100)}
    packed = gzip.compress(tarred(files))
    bad = packed[: len(packed) // 2] + bytes([packed[len(packed) // 2] ^ 0x55]) + packed[len(packed) // 2 + 1 :]
    assert isinstance(unpacked(bad)[1], zlib.error)
    documents, refusals = extract_bytes("text", "a.tar.gz", bad)
    texts = {document.meta["origin"].rpartition("!")[2]: document.text for document in documents}
    good = [name for name, content in files.items() if texts.get(name) == content.decode()]
    assert len(good) > 45
    assert refusals


def test_a_wrong_checksum_costs_no_byte() -> None:
    content = bytes(range(256)) * 40
    packed = gzip.compress(content)
    found, error = unpacked(packed[:-8] + b"\x00" * 4 + packed[-4:])
    assert found == content
    assert isinstance(error, zlib.error)
