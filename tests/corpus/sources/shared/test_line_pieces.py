from __future__ import annotations

import gzip
import io
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Piece
from piledriver.corpus.sources.shared.line_pieces import line_pieces, piece_lines


def lines(stream: RawStream, piece_bytes: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    for piece in line_pieces(stream, piece_bytes):
        assert isinstance(piece, Piece)
        for item in piece_lines(piece):
            assert not isinstance(item, Refusal)
            found.append(item)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b" ").replace(b"\r", b" ")), max_size=30),
    st.integers(1, 64),
)
def test_every_line_once_at_its_place_wherever_the_file_is_cut(written: list[bytes], piece_bytes: int) -> None:
    content = b"{}\n" + b"\n".join(written)
    expected = [line for line in content.split(b"\n") if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        path.write_bytes(content)
        for stream in (
            RawStream("a", "a", str(path)),
            RawStream("a", "a", content=io.BytesIO(content)),
            RawStream("a", "a", content=io.BytesIO(gzip.compress(content))),
        ):
            found = lines(stream, piece_bytes)
            stream.close()
            assert [line for _, line in found] == expected
            assert all(content[place : place + len(line)] == line for place, line in found)


def test_a_part_that_begins_like_a_compressed_file_is_not_one() -> None:
    piece = Piece("a", data=b"\x1f\x8b and so on\nBZh\n", extra=3)
    assert list(piece_lines(piece)) == [(3, b"\x1f\x8b and so on"), (16, b"BZh")]


def test_a_line_that_is_too_long_is_refused_and_the_rest_goes_on() -> None:
    piece = Piece("a", data=b"one\n" + b"x" * 600_000 + b"\ntwo\n", extra=0)
    one, long, two = piece_lines(piece, max_bytes=300_000)
    assert one == (0, b"one")
    assert isinstance(long, Refusal)
    assert long.origin == "a#4"
    assert two == (600_005, b"two")
