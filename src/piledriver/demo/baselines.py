"""Baselines for bits per byte: the same figure for compressors and other well-known methods."""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterable

import numpy as np
import zstandard

from piledriver.corpus import Document


def zstd_bits(documents: Iterable[Document]) -> float:
    """Return the bits per byte of zstd at its highest level on the concatenated texts."""
    content = _joined(documents)
    return 8 * len(zstandard.ZstdCompressor(level=22).compress(content)) / max(1, len(content))


def xz_bits(documents: Iterable[Document]) -> float:
    """Return the bits per byte of xz at its highest level on the concatenated texts."""
    content = _joined(documents)
    return 8 * len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)) / max(1, len(content))


class ByteFrequencies:
    """A unigram model of bytes, estimated from the training text."""

    def __init__(self, documents: Iterable[Document]) -> None:
        counts = np.ones(256)
        for document in documents:
            counts += np.bincount(np.frombuffer(document.text.encode("utf-8", "replace"), np.uint8), minlength=256)
        self._bits = -np.log2(counts / counts.sum())

    def bits(self, documents: Iterable[Document]) -> float:
        """Return the bits per byte of texts under the model."""
        content = np.frombuffer(_joined(documents), np.uint8)
        return float(self._bits[content].mean()) if len(content) else math.nan


def _joined(documents: Iterable[Document]) -> bytes:
    return "\n\n".join(document.text for document in documents).encode("utf-8", "replace")
