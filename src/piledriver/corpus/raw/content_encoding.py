"""Remove the compression that the header of an HTTP response names from its body."""

from __future__ import annotations

import zlib


def without_content_encoding(content: bytes, names: str, limit_bytes: int) -> bytes:
    """Return the decompressed body, at most one byte more than the limit.

    Many archives keep the header but not the compression, and some servers send a wrong one: a body that cannot be
    decompressed is returned unchanged, of a truncated one the part that is there.

    >>> without_content_encoding(zlib.compress(b"<p>"), "deflate", 99), without_content_encoding(b"<p>", "gzip", 99)
    (b'<p>', b'<p>')
    """
    for name in reversed([name.strip().lower() for name in names.split(",")]):
        if name in ("gzip", "x-gzip", "deflate"):
            content = _inflated(content, limit_bytes)
        elif name == "br":
            content = _unbrotlied(content, limit_bytes)
        elif name == "zstd":
            content = _unzstd(content, limit_bytes)
    return content


def _inflated(content: bytes, limit_bytes: int) -> bytes:
    # gzip and zlib have headers; some servers send raw deflate data, which has none.
    for window in (47, -15):
        try:
            return zlib.decompressobj(window).decompress(content, limit_bytes + 1) or content
        except zlib.error:
            continue
    return content


def _unbrotlied(content: bytes, limit_bytes: int) -> bytes:
    import brotli  # type: ignore[import-untyped]

    reader = brotli.Decompressor()
    found = bytearray()
    try:
        # A few bytes at a time, because they may expand to very many.
        for start in range(0, len(content), 1 << 12):
            found += reader.process(content[start : start + (1 << 12)])
            if len(found) > limit_bytes:
                break
    except brotli.error:
        return bytes(found) or content
    return bytes(found[: limit_bytes + 1])


def _unzstd(content: bytes, limit_bytes: int) -> bytes:
    import zstandard

    try:
        return zstandard.ZstdDecompressor().stream_reader(content).read(limit_bytes + 1)
    except zstandard.ZstdError:
        return content
