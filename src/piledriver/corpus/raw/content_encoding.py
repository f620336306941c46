"""The body of an HTTP answer without the compression that its header names."""

from __future__ import annotations

import zlib


def without_content_encoding(content: bytes, names: str, limit_bytes: int) -> bytes:
    """The body as the page that it is; at most one byte more than the limit.

    Many archives keep the header but not the compression, and some servers lie: what cannot be unpacked is taken as it
    is, and of a body that was cut what is there.

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
    # gzip and zlib by their headers; some servers call it deflate when it has none.
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
        # A few bytes at a time: they may stand for very many.
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
