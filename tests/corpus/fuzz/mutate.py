"""Valid raw files with something wrong: seeded, structured mutations, inside of compression and archives too."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import zstandard

Mutation = Callable[[random.Random, bytes], bytes]

JUNK = (
    b"", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xc3", b"\xef\xbb\xbf", b"\x1f\x8b", b"<", b">", b"&", b"&#x110000;",
    b"&#0;", b"&lt;", b"]]>", b"<![CDATA[", b"<!--", b"-->", b"<?", b"\"", b"'", b"\\", b"\\\\", b"{", b"}", b"[", b"]",
    b"{{", b"}}", b"{|", b"|}", b"[[", b"]]", b"$", b"$$", b"%", b"\\begin{", b"\\end{", b"\\def\\a{\\a\\a}\\a", b"\n",
    b"\r", b"\r\n", b"\n\n", b"\t", b",", b";", b":", b"=", b"--", b"From ", b"\nFrom ", b"null", b"true", b"-1", b"0",
    b"1e999", b"99999999999999999999", b"18446744073709551616", b"NaN", b"\xe2\x80\xa8", b"\xf0\x9f\x98\x80",
    b"\\u0000",
    b"\\ud800", b"<script>", b"</script>", b"<table>", b"<tr><td>", b"<pre>", b"<math>", b"</p>", b"<br/>", b"</s>",
    b"=?utf-8?q?=ff?=", b"\x1b[31m", b"\x85", b"-->\n", b"00:00:01,000 --> 99:99:99,999", b"</row>", b"</page>",
)  # fmt: skip
_NUMBER = re.compile(rb"\d{1,12}")
_WORD = re.compile(rb"[A-Za-z]{2,20}")


def mutated(luck: random.Random, content: bytes, other: bytes = b"") -> bytes:
    """The content with one to four edits; what is packed is often unpacked, edited inside and packed again."""
    if content[:1] in (b"{", b"[") and luck.random() < 0.5:
        return _retyped(luck, content)
    if luck.random() < 0.6 and (inside := _inside(luck, content, other)) is not None:
        return inside
    for _ in range(luck.choice((1, 1, 2, 4))):
        content = luck.choice(MUTATIONS)(luck, content) if luck.random() < 0.93 else _spliced(luck, content, other)
    return content


def _place(luck: random.Random, content: bytes) -> int:
    return luck.randrange(len(content) + 1)


def _span(luck: random.Random, content: bytes) -> tuple[int, int]:
    at = _place(luck, content)
    return at, min(len(content), at + int(2 ** luck.uniform(0, 9)))


def _flipped(luck: random.Random, content: bytes) -> bytes:
    if not content:
        return b"\x80"
    at = luck.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << luck.randrange(8))]) + content[at + 1 :]


def _cut(luck: random.Random, content: bytes) -> bytes:
    return content[: _place(luck, content)]


def _beheaded(luck: random.Random, content: bytes) -> bytes:
    return content[_place(luck, content) :]


def _without(luck: random.Random, content: bytes) -> bytes:
    start, end = _span(luck, content)
    return content[:start] + content[end:]


def _doubled(luck: random.Random, content: bytes) -> bytes:
    start, end = _span(luck, content)
    return content[:end] + content[start:end] * luck.choice((1, 2, 50)) + content[end:]


def _moved(luck: random.Random, content: bytes) -> bytes:
    start, end = _span(luck, content)
    rest = content[:start] + content[end:]
    at = _place(luck, rest)
    return rest[:at] + content[start:end] + rest[at:]


def _junk(luck: random.Random, content: bytes) -> bytes:
    start, end = _span(luck, content)
    end = luck.choice((start, start, end))
    junk = luck.choice(JUNK) if luck.random() < 0.9 else luck.randbytes(luck.randrange(1, 30))
    return content[:start] + junk * luck.choice((1, 1, 1, 3, 400)) + content[end:]


def _number(luck: random.Random, content: bytes) -> bytes:
    """A declared length, date or id that is wrong."""
    return _replaced(luck, content, _NUMBER, (b"0", b"-1", b"1", b"4294967296", b"99999999999999999999", b"", b"1.5"))


def _word(luck: random.Random, content: bytes) -> bytes:
    """A name of a tag, field or command in the place of another."""
    words = _WORD.findall(content[:20_000]) or [b"x"]
    return _replaced(luck, content, _WORD, (luck.choice(words), luck.choice(words).upper(), b"x" * 5_000))


def _replaced(luck: random.Random, content: bytes, pattern: re.Pattern[bytes], by: tuple[bytes, ...]) -> bytes:
    found = list(pattern.finditer(content[:200_000]))
    if not found:
        return _junk(luck, content)
    chosen = luck.choice(found)
    return content[: chosen.start()] + luck.choice(by) + content[chosen.end() :]


def _retyped(luck: random.Random, content: bytes) -> bytes:
    """A value of a JSON line (or of the whole file) in another type."""
    lines = content.split(b"\n")
    at = luck.randrange(len(lines))
    try:
        value = json.loads(lines[at])
    except (ValueError, RecursionError):
        return _junk(luck, content)
    holder, key = _somewhere(luck, [value], 0)
    holder[key] = luck.choice(
        (None, True, 0, -1, 1.5, 10**30, "", "x", "\ud800", [], [None], {}, {"a": 1}, [[1]], "1" * 400)
    )
    lines[at] = json.dumps(value).encode()
    return b"\n".join(lines)


def _somewhere(luck: random.Random, holder: Any, key: Any) -> tuple[Any, Any]:
    """A place in nested lists and objects."""
    inside = holder[key]
    while isinstance(inside, list | dict) and inside and luck.random() < 0.8:
        holder, key = inside, luck.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        inside = holder[key]
    return holder, key


def _spliced(luck: random.Random, content: bytes, other: bytes) -> bytes:
    return content[: _place(luck, content)] + other[_place(luck, other) :]


MUTATIONS: tuple[Mutation, ...] = (
    _flipped, _cut, _beheaded, _without, _doubled, _moved, _junk, _junk, _junk, _number, _word, _word,
)  # fmt: skip


def _inside(luck: random.Random, content: bytes, other: bytes) -> bytes | None:
    """The content of a compressed file or one member of an archive mutated, the rest as it was; None of a plain one."""
    try:
        if content[:2] == b"\x1f\x8b":
            return gzip.compress(mutated(luck, gzip.decompress(content), other), 1)
        if content[:3] == b"BZh":
            return bz2.compress(mutated(luck, bz2.decompress(content), other))
        if content[:6] == b"\xfd7zXZ\x00":
            return lzma.compress(mutated(luck, lzma.decompress(content), other), preset=0)
        if content[:4] == b"\x28\xb5\x2f\xfd":
            plain = zstandard.ZstdDecompressor().decompressobj().decompress(content)
            return zstandard.ZstdCompressor(1).compress(mutated(luck, plain, other))
        if content[:4] == b"PK\x03\x04":
            return _zip(luck, content, other)
        if content[257:262] == b"ustar":
            return _tar(luck, content, other)
        if content[:2] in (b"x\x01", b"x\x9c"):
            return zlib.compress(mutated(luck, zlib.decompress(content), other))
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zstandard.ZstdError, tarfile.TarError):
        return None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, KeyError):
        return None
    return None


def _zip(luck: random.Random, content: bytes, other: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    target = io.BytesIO()
    chosen = luck.randrange(len(members))
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number, (name, member) in enumerate(members):
            archive.writestr(name, mutated(luck, member, other) if number == chosen else member)
    return target.getvalue()


def _tar(luck: random.Random, content: bytes, other: bytes) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive, tarfile.open(fileobj=target, mode="w") as out:
        entries = archive.getmembers()
        chosen = luck.randrange(len(entries))
        for number, entry in enumerate(entries):
            file = archive.extractfile(entry)
            member = file.read() if file is not None else b""
            if number == chosen:
                member = mutated(luck, member, other)
                entry.size = len(member)
            out.addfile(entry, io.BytesIO(member))
    return target.getvalue()
