"""WARC, zip, 7z and Parquet with damage inside: what is whole before it is kept, and behind it where the format allows;
what is bad is named. Encrypted members and bombs are refused as such.
"""

from __future__ import annotations

import gzip
import io
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from piledriver.corpus.document import Document
from piledriver.corpus.raw import limits
from tests.corpus.fuzz.seeds import parquet, seven_zipped, tarred
from tests.corpus.sources.extracting import extract_bytes
from tests.corpus.sources.test_pile_cc import PROSE, record
from tests.patience import HANG_S

MEMBERS = 12
BAD = 6
_luck = random.Random(5)


def words(number: int) -> str:
    noise = " ".join("".join(_luck.choices("abcdefghij", k=5)) for _ in range(60))
    return f"mark{number:03d} {PROSE} {noise}. {PROSE} ended{number:03d}"


TEXTS = [words(number) for number in range(MEMBERS)]
FILES = {f"{number:03d}.txt": text.encode() for number, text in enumerate(TEXTS)}
RESPONSES = [record(f"<html><body><p>{text}</p></body></html>".encode()) for text in TEXTS]
CONVERSIONS = [record(text.encode(), kind="conversion", media="text/plain") for text in TEXTS]
ARC = [
    b"http://a/%d 1.1.1.1 20200101000000 text/html %d\n<p>%s</p>\n" % (number, len(text) + 7, text.encode())
    for number, text in enumerate(TEXTS)
]
WITHOUT_BAD = [number for number in range(MEMBERS) if number != BAD]
BEFORE_BAD = list(range(BAD))
EVERY = list(range(MEMBERS))


def numbers(documents: list[Document]) -> list[int]:
    """Which texts came; each must be whole and alone."""
    for document in documents:
        assert document.text.count("mark") == document.text.count("ended") == 1, document.text[:60]
    return [int(document.text[4:7]) for document in documents]


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


def zip_of(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, seekable: bool = True) -> bytes:
    """A zip archive; one that is written as a stream has the sizes behind its members."""
    target = io.BytesIO()
    out = target if seekable else _Stream(target)
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target.getvalue()


class _Stream(io.RawIOBase):
    def __init__(self, target: io.BytesIO) -> None:
        self._target = target

    def writable(self) -> bool:
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        return self._target.write(content)


WEB = {"a.warc": RESPONSES, "a.warc.wet": CONVERSIONS, "a.arc": ARC}


@pytest.mark.parametrize("name", WEB)
@pytest.mark.parametrize("packed", ["plain", "by record", "one stream"])
def test_web_archives_that_break_off(name: str, packed: str) -> None:
    pack = gzip.compress if packed == "by record" else bytes
    parts = [pack(part) for part in WEB[name]]
    whole = b"".join(parts)
    cut = len(b"".join(parts[:BAD])) + len(parts[BAD]) // 2
    if packed == "one stream":
        whole, cut = gzip.compress(whole), len(gzip.compress(whole)) // 2
    suffix = "" if packed == "plain" else ".gz"
    documents, refusals = extract_bytes("pile-cc", name + suffix, whole[:cut])
    found = numbers(documents)
    assert found == (BEFORE_BAD if packed != "one stream" else EVERY[: len(found)])
    assert len(found) >= 4
    assert refusals


@pytest.mark.parametrize("name", ["a.warc", "a.warc.wet"])
def test_a_damaged_record_of_a_web_archive_costs_itself(name: str) -> None:
    packed = [gzip.compress(part) for part in WEB[name]]
    wrong_checksum = packed[BAD][:-8] + b"\x00\x00\x00\x00" + packed[BAD][-4:]
    for bad in (flipped(packed[BAD], len(packed[BAD]) // 2), wrong_checksum):
        documents, refusals = extract_bytes("pile-cc", f"{name}.gz", b"".join([*packed[:BAD], bad, *packed[BAD + 1 :]]))
        assert numbers(documents) == WITHOUT_BAD
        assert [refusal.reason for refusal in refusals] == ["damaged record"]
        assert refusals[0].origin == f"{name}.gz#{len(b''.join(packed[:BAD]))}"


@pytest.mark.parametrize("name", ["a.warc", "a.warc.wet"])
@pytest.mark.parametrize("more", [5, 100, 10**6, 10**18])
@pytest.mark.parametrize("packed", [True, False])
def test_a_record_that_says_it_is_longer_does_not_swallow_the_next(name: str, more: int, packed: bool) -> None:
    parts = list(WEB[name])

    def longer(found: re.Match[bytes]) -> bytes:
        return b"Content-Length: %d" % (int(found[1]) + more)

    parts[BAD] = re.sub(rb"Content-Length: (\d+)", longer, parts[BAD], count=1)
    content = b"".join(map(gzip.compress, parts)) if packed else b"".join(parts)
    documents, refusals = extract_bytes("pile-cc", name + (".gz" if packed else ""), content)
    assert numbers(documents) == WITHOUT_BAD
    assert [refusal.reason for refusal in refusals] == ["wrong record length"]


def test_a_web_archive_with_a_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = record(b"<p>" + b"a " * (20 << 20))
    parts = [*RESPONSES[:BAD], bomb, *RESPONSES[BAD + 1 :]]
    documents, refusals = extract_bytes("pile-cc", "a.warc.gz", b"".join(map(gzip.compress, parts)))
    assert numbers(documents) == WITHOUT_BAD
    assert [refusal.reason for refusal in refusals] == ["too large"]


ZIPS = {
    "deflated": lambda: zip_of(FILES),
    "stored": lambda: zip_of(FILES, zipfile.ZIP_STORED),
    "written as a stream": lambda: zip_of(FILES, seekable=False),
}


@pytest.mark.parametrize("kind", ZIPS)
def test_a_zip_that_breaks_off_gives_the_members_before(kind: str) -> None:
    whole = ZIPS[kind]()
    begins = whole.index(b"PK\x03\x04", whole.index(b"006.txt") - 40)
    cut = whole[: begins + 300]
    for name, content in (("a.zip", cut), ("a.tar", tarred({"in.zip": cut}))):
        documents, refusals = extract_bytes("text", name, content)
        assert numbers(documents) == BEFORE_BAD
        assert [refusal.reason for refusal in refusals] == ["damaged archive", "damaged data"]
        assert refusals[1].origin.endswith("!006.txt")
    # Only the directory at the end is not whole.
    documents, refusals = extract_bytes("text", "a.zip", whole[:-30])
    assert numbers(documents) == EVERY
    assert [refusal.reason for refusal in refusals] == ["damaged archive"]


def in_directory(content: bytes, name: bytes) -> int:
    """Where the entry of a member in the directory begins."""
    return content.rindex(b"PK\x01\x02", 0, content.rindex(name))


ZIP_DAMAGE: dict[str, tuple[Callable[[bytes, int], bytes], str]] = {
    "wrong checksum": (lambda z, at: z[: at + 16] + b"\x00\x00\x00\x00" + z[at + 20 :], "damaged data"),
    "encrypted": (lambda z, at: z[: at + 8] + bytes([z[at + 8] | 1]) + z[at + 9 :], "encrypted member"),
    "unknown method": (lambda z, at: z[: at + 10] + b"\x63\x00" + z[at + 12 :], "damaged member"),
    "flipped byte": (lambda z, at: flipped(z, z.index(b"006.txt") + 250), "damaged data"),
}


@pytest.mark.parametrize("damage", ZIP_DAMAGE)
@pytest.mark.parametrize("kind", ZIPS)
def test_a_bad_member_of_a_zip_costs_itself(kind: str, damage: str) -> None:
    whole = ZIPS[kind]()
    change, reason = ZIP_DAMAGE[damage]
    documents, refusals = extract_bytes("text", "a.zip", change(whole, in_directory(whole, b"006.txt")))
    assert numbers(documents) == WITHOUT_BAD
    assert [(refusal.reason, refusal.origin) for refusal in refusals] == [(reason, "a.zip!006.txt")]


def test_a_bomb_in_a_zip_without_its_directory_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EXPANSION_GRACE_BYTES", 1 << 16)
    monkeypatch.setattr(limits, "MAX_EXPANSION", 100)
    whole = zip_of({"a.txt": TEXTS[0].encode(), "bomb.txt": bytes(20 << 20), "b.txt": TEXTS[1].encode()})
    documents, refusals = extract_bytes("text", "a.zip", whole[:-30])
    assert numbers(documents) == [0, 1]
    assert [refusal.reason for refusal in refusals] == ["damaged archive", "compression bomb"]


def blocks_of_7z(*blocks: dict[str, bytes]) -> bytes:
    """An archive of several blocks."""
    import py7zr

    target = io.BytesIO()
    for number, files in enumerate(blocks):
        target.seek(0)
        with py7zr.SevenZipFile(target, "a" if number else "w", filters=[{"id": py7zr.FILTER_COPY}]) as archive:
            for name, content in files.items():
                archive.writestr(content, name)
    return target.getvalue()


def test_damage_in_a_7z_costs_what_stands_behind_it_in_its_block() -> None:
    first = {name: content for name, content in FILES.items() if name < "008.txt"}
    second = {name: content for name, content in FILES.items() if name >= "008.txt"}
    whole = blocks_of_7z(first, second)
    documents, refusals = extract_bytes("text", "a.7z", flipped(whole, whole.index(b"mark006") + 600))
    assert numbers(documents) == [*BEFORE_BAD, 8, 9, 10, 11]
    assert [(refusal.reason, refusal.origin) for refusal in refusals] == [
        ("damaged data", "a.7z!006.txt"),
        ("damaged member", "a.7z!007.txt"),
    ]


def test_a_7z_that_breaks_off_is_refused_whole() -> None:
    # Names and lengths stand at its end: without them nothing can be told apart.
    whole = seven_zipped(FILES)
    documents, refusals = extract_bytes("text", "a.7z", whole[: len(whole) // 2])
    assert (documents, [refusal.reason for refusal in refusals]) == ([], ["damaged archive"])


@pytest.mark.parametrize("headers", [False, True])
def test_an_encrypted_7z_is_refused_as_such(headers: bool) -> None:
    import py7zr

    target = io.BytesIO()
    with py7zr.SevenZipFile(target, "w", password="x", header_encryption=headers) as archive:
        archive.writestr(b"secret", "a.txt")
    documents, refusals = extract_bytes("text", "a.7z", target.getvalue())
    assert (documents, [refusal.reason for refusal in refusals]) == ([], ["encrypted archive"])


def test_bombs_and_climbing_names_in_a_7z_cost_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EXPANSION_GRACE_BYTES", 1 << 16)
    monkeypatch.setattr(limits, "MAX_EXPANSION", 100)
    content = seven_zipped({"0.txt": FILES["000.txt"], "bomb.txt": bytes(20 << 20), "2.txt": b"behind"})
    documents, refusals = extract_bytes("text", "a.7z", content)
    assert numbers(documents) == [0]
    assert {(refusal.reason, refusal.origin) for refusal in refusals} == {
        ("compression bomb", "a.7z!bomb.txt"),
        ("compression bomb", "a.7z!2.txt"),
    }
    evil = seven_zipped({"up/x.txt": b"climbs", "1.txt": FILES["001.txt"]})
    at = "up".encode("utf-16-le")
    if at in evil:
        documents, refusals = extract_bytes("text", "a.7z", evil.replace(at, "..".encode("utf-16-le")))
        assert [refusal.reason for refusal in refusals] in (["unsafe member name"], ["damaged archive"])


ROWS: list[dict[str, object]] = [{"text": text, "number": number} for number, text in enumerate(TEXTS)]


def with_checksums() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), target, row_group_size=2, write_page_checksum=True, compression="none")
    return target.getvalue()


@pytest.mark.parametrize("name", ["a.parquet", "a.zip"])
def test_a_damaged_row_group_costs_itself(name: str) -> None:
    whole = with_checksums()
    bad = flipped(whole, whole.index(b"mark006") + 300)
    content = bad if name == "a.parquet" else zip_of({"a.parquet": bad})
    documents, refusals = extract_bytes("parquet", name, content)
    assert numbers(documents) == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]
    assert [(refusal.reason, refusal.origin[-4:]) for refusal in refusals] == [("invalid parquet", "#3:0")]


def test_a_parquet_file_that_breaks_off_is_refused_whole() -> None:
    # What its columns are stands at its end.
    whole = parquet(ROWS)
    documents, refusals = extract_bytes("parquet", "a.parquet", whole[: len(whole) // 2])
    assert (documents, [refusal.reason for refusal in refusals]) == ([], ["invalid parquet"])
    documents, refusals = extract_bytes("parquet", "a.parquet", whole[:-4] + b"PARE")
    assert (documents, [refusal.reason for refusal in refusals]) == ([], ["encrypted file"])


def test_a_parquet_bomb_costs_its_row_group(tmp_path: Path) -> None:
    # 250 rows of one value that is stored once; a limit of memory stands for that of a worker.
    rows: list[dict[str, object]] = [{"text": "word " * 800_000}] * 250
    content = parquet([{"text": "good"}, *rows, {"text": "better"}], rows_a_group=126)
    assert len(content) < 1 << 20
    (tmp_path / "a.parquet").write_bytes(content)
    script = (
        "import resource, sys; from piledriver.corpus.extraction import extract_files; from piledriver.corpus."
        "sources import SOURCES; source = SOURCES['parquet']; list(extract_files(source, [sys.argv[2]])); resource."
        "setrlimit(resource.RLIMIT_DATA, (700 << 20, 700 << 20)); print([getattr(item, 'reason', 0) for item in "
        "extract_files(source, [sys.argv[1]]) if len(getattr(item, 'text', '')) < 99])"
    )
    (tmp_path / "small.parquet").write_bytes(parquet(ROWS))
    run = [sys.executable, "-c", script, str(tmp_path / "a.parquet"), str(tmp_path / "small.parquet")]
    found = subprocess.run(run, capture_output=True, text=True, timeout=HANG_S, check=True).stdout
    assert "out of memory" in found
