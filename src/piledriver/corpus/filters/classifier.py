"""A text classifier in the manner of fastText: one weight for each hashed word and word n-gram, and a logistic output.

The score of a text is the logistic function of the sum of its weights over the square root of their number. Training is
one compiled loop of AdaGrad over the examples in a random order that the seed determines, so the same examples give the
same model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, UsageError
from piledriver.core.random import Stream
from piledriver.corpus.text.words import scan_tokens

Float32Array = npt.NDArray[np.float32]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
# Version 0.1 wrote a line of JSON, padded to this size, then the arrays.
_HEADER_BYTES_0_1 = 4096


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings:
    """Training settings of a classifier."""

    bits: int = 20
    """The logarithm of the number of weights; features with the same hash share one."""
    word_ngrams: int = 2
    """The longest word n-gram that is a feature."""
    epochs: int = 5
    """Passes over the examples."""
    learning_rate: float = 0.2
    """Step size of AdaGrad."""
    seed: int = 0
    """Determines the order of the examples."""

    def __post_init__(self) -> None:
        if not 8 <= self.bits <= 30:
            raise ValueError(f"bits is {self.bits}; it must be from 8 to 30")
        if self.word_ngrams < 1 or self.epochs < 1:
            raise ValueError("word_ngrams and epochs must be at least 1")


def excerpt(text: str) -> str:
    """Return the part of a text that is scored, as for Pile-CC: the last 1,500 of the first 4,000 characters."""
    return text[:4000][-1500:]


@dataclass(frozen=True)
class Classifier:
    """A trained classifier.

    >>> good, bad = ["a study of rivers"] * 20, ["buy cheap pills now"] * 20
    >>> model = train_classifier(good, bad, ClassifierSettings(bits=10))
    >>> model.score("a study of hills") > 0.5 > model.score("buy pills")
    True
    """

    weights: Float32Array
    bias: float
    word_ngrams: int

    def score(self, text: str) -> float:
        """Return the probability that the text is a good one."""
        features = _features(scan_tokens(excerpt(text)), self.word_ngrams, len(self.weights) - 1)
        return float(_score(features, self.weights, self.bias))

    def save(self, path: storage.Location) -> None:
        """Write the model to one safetensors file."""
        fixed = np.array([self.bias, self.word_ngrams], np.float64)
        storage.write_bytes(path, safetensors.numpy.save({"weights": self.weights, "fixed": fixed}))


def load_classifier(path: str) -> Classifier:
    """Read a model that `save`, here or in version 0.1, wrote."""
    content = storage.read_bytes(path)
    try:
        arrays = _arrays_0_1(content) if content.startswith(b"{") else safetensors.numpy.load(content)
        bias, word_ngrams = arrays["fixed"].tolist()
        return Classifier(np.array(arrays["weights"]), bias, int(word_ngrams))
    except (KeyError, ValueError, SafetensorError) as error:
        raise CorruptFileError(
            f"{path} is not a classifier: {error}", fix="make it again with 'piledriver corpus classifier'"
        ) from error


def _arrays_0_1(content: bytes) -> dict[str, npt.NDArray[Any]]:
    header = json.loads(content[:_HEADER_BYTES_0_1])
    return {
        name: np.frombuffer(content, entry["dtype"], entry["shape"][0], entry["offset"])
        for name, entry in header.items()
    }


def train_classifier(good: Iterable[str], bad: Iterable[str], settings: ClassifierSettings | None = None) -> Classifier:
    """Train a classifier to tell good texts from bad ones."""
    settings = settings or ClassifierSettings()
    mask = (1 << settings.bits) - 1
    rows, labels = [], []
    for label, texts in ((1, good), (0, bad)):
        for text in texts:
            rows.append(_features(scan_tokens(excerpt(text)), settings.word_ngrams, mask))
            labels.append(label)
    if len(set(labels)) < 2:
        raise UsageError("a classifier needs good and bad texts", fix="give at least one of each")
    bounds = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    order = np.concatenate(
        [
            np.argsort(Stream(settings.seed, "classifier", epoch).bits(np.arange(len(rows))), kind="stable")
            for epoch in range(settings.epochs)
        ]
    )
    weights = np.zeros(mask + 1, np.float32)
    bias = _fit(np.concatenate(rows), bounds, np.array(labels, np.float32), order, settings.learning_rate, weights)
    return Classifier(weights, float(bias), settings.word_ngrams)


def evaluate_classifier(model: Classifier, good: Sequence[str], bad: Sequence[str]) -> dict[str, float]:
    """Return the accuracy at a threshold of one half, and the area under the ROC curve, on held-out texts."""
    scores = np.array([model.score(text) for text in (*good, *bad)])
    label = np.arange(len(scores)) < len(good)
    # Equal scores share the mean of their ranks; otherwise a constant score would be rated by the order of the texts.
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    pairs = max(1, len(good) * len(bad))
    area = (rank[label].sum() - len(good) * (len(good) + 1) / 2) / pairs
    return {"accuracy": float(((scores > 0.5) == label).mean()), "auc": float(area), "texts": float(len(scores))}


@numba.njit(cache=True, nogil=True)
def _features(words: UInt64Array, ngrams: int, mask: int) -> UInt32Array:
    count = 0
    for width in range(1, ngrams + 1):
        count += max(0, words.size - width + 1)
    features = np.empty(count, np.uint32)
    at = 0
    for width in range(1, ngrams + 1):
        for start in range(words.size - width + 1):
            hashed = np.uint64(width)
            for word in range(start, start + width):
                hashed = (hashed ^ words[word]) * np.uint64(0xFF51AFD7ED558CCD)
                hashed ^= hashed >> np.uint64(32)
            features[at] = np.uint32(hashed & np.uint64(mask))
            at += 1
    return features


@numba.njit(cache=True, nogil=True)
def _score(features: UInt32Array, weights: Float32Array, bias: float) -> float:
    total = 0.0
    for feature in features:
        total += weights[feature]
    total = total / np.sqrt(max(1, features.size)) + bias
    likely: float = 1.0 / (1.0 + np.exp(-total))
    return likely


@numba.njit(cache=True, nogil=True)
def _fit(
    features: UInt32Array,
    bounds: npt.NDArray[np.int64],
    labels: Float32Array,
    order: npt.NDArray[np.int64],
    rate: float,
    weights: Float32Array,
) -> float:
    squares = np.zeros(weights.size, np.float32)
    bias, bias_square = 0.0, 0.0
    for example in order:
        row = features[bounds[example] : bounds[example + 1]]
        error = _score(row, weights, bias) - labels[example]
        step = error / np.sqrt(max(1, row.size))
        for feature in row:
            squares[feature] += np.float32(step * step)
            weights[feature] -= np.float32(rate * step / (np.sqrt(squares[feature]) + 1e-8))
        bias_square += error * error
        bias -= rate * error / (np.sqrt(bias_square) + 1e-8)
    return bias
