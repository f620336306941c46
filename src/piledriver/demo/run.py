"""The demo: every step is a call of the public API."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from piledriver.core import storage
from piledriver.core.config import from_mapping
from piledriver.core.errors import ConfigError, UsageError
from piledriver.corpus import Document, read_shards
from piledriver.corpus.pipeline.build import build_corpus
from piledriver.corpus.pipeline.manifest import Manifest
from piledriver.corpus.pipeline.recipe import Recipe
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.data.tokenizer.training import TokenizerTraining, train_tokenizer
from piledriver.data.tokens.token_set import TokenSet
from piledriver.data.tokens.tokenize import tokenize_corpus
from piledriver.demo.baselines import ByteFrequencies, xz_bits, zstd_bits
from piledriver.demo.domains import Domain, find_domains
from piledriver.demo.page import write_page
from piledriver.demo.result import DemoResult
from piledriver.demo.samples import make_samples
from piledriver.evaluate import Figures, TransformerScorer, bits_per_byte, summarise
from piledriver.evaluate.validation import on_documents
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import load_folder
from piledriver.optim import OptimizerConfig
from piledriver.train import DataConfig, RunSummary, TrainConfig, train

_VOCABULARY = 2048
_BYTES_EACH = 1_500_000


def run_demo(
    out: str,
    *,
    minutes: float = 2.0,
    workers: int = 1,
    bytes_each: int = _BYTES_EACH,
    say: Callable[[str], None] = print,
) -> DemoResult:
    """Build a corpus from this machine's files, train a tokenizer and a model, and measure bits per byte."""
    begun, seconds = time.monotonic(), dict[str, float]()
    domains, manifest, tokenizer, config = _prepared(out, minutes, workers, bytes_each, seconds, say)
    train_split = os.path.join(out, "corpus", "train")
    validation = list(read_shards(os.path.join(out, "corpus", "validation")))
    test, reserve = _reserve(list(read_shards(os.path.join(out, "corpus", "test"))), validation)
    with _timed(seconds, "bits per byte before training"):
        assert isinstance(config.model, ModelConfig)
        before = _scored(Transformer(config.model, seed=config.seed), tokenizer, test)
    held_out = _few([*validation, *reserve])
    with _timed(seconds, "training"):
        summary = _trained(config, on_documents(held_out, tokenizer))
    model = load_folder(os.path.join(out, "run", "model"))
    with _timed(seconds, "bits per byte after training"):
        after = _scored(model, tokenizer, test)
    with _timed(seconds, "baselines"):
        baselines = _baselines(read_shards(train_split), test)
    samples = make_samples(model, tokenizer, test)
    seconds["the rest"] = time.monotonic() - begun - sum(seconds.values())
    result = DemoResult(out, domains, manifest, summary, before, after, baselines, samples, seconds)
    write_page(result, os.path.join(out, "report.html"))
    return result


def train_demo_model(out: str, *, minutes: float, workers: int = 1, say: Callable[[str], None] = print) -> None:
    """Build the demo's corpus and train its tokenizer and model, and measure nothing."""
    *_, config = _prepared(out, minutes, workers, _BYTES_EACH, {}, say)
    _trained(config, None)


def _prepared(
    out: str, minutes: float, workers: int, bytes_each: int, seconds: dict[str, float], say: Callable[[str], None]
) -> tuple[list[Domain], Manifest, Tokenizer, TrainConfig]:
    """Build the corpus, train the tokenizer, and return what a run of training needs."""
    if not 0 < minutes < math.inf:
        raise UsageError(f"{minutes:g} minutes of training", fix="give a positive number")
    if os.path.exists(out) and not os.path.isdir(out):
        raise UsageError(f"{out} is a file", fix="name a folder")
    storage.make_folder(out)
    domains = find_domains(Path(out) / "raw", bytes_each, seed=0)
    say(f"found {len(domains)} domains on this machine: {', '.join(domain.name for domain in domains)}")
    with _timed(seconds, "corpus"):
        manifest = build_corpus(_recipe(domains), os.path.join(out, "corpus"), workers=workers)
    train_split = os.path.join(out, "corpus", "train")
    with _timed(seconds, "tokenizer"):
        tokenizer = _tokenizer(out, train_split)
        tokens = tokenize_corpus(
            train_split, os.path.join(out, "tokenizer.json"), os.path.join(out, "tokens"), workers=workers
        )
    return domains, manifest, tokenizer, _config(out, tokens, tokenizer, minutes)


def _recipe(domains: list[Domain]) -> Recipe:
    """Return the recipe: a length filter, exact and near deduplication, held-out splits."""
    described: dict[str, Any] = {
        "name": "demo",
        "sources": [{"source": d.source, "name": d.name, "paths": d.paths} for d in domains],
        "stages": [{"use": "length", "settings": {"min_characters": 200}}, {"use": "exact"}, {"use": "near"}],
        "splits": {"validation": 0.04, "test": 0.08},
    }
    return from_mapping(Recipe, described, "demo")


def _tokenizer(out: str, corpus: str) -> Tokenizer:
    path = Path(out) / "tokenizer.json"
    path.write_bytes(train_tokenizer(corpus, TokenizerTraining(vocab_size=_VOCABULARY)).content)
    return open_tokenizer(path)


def _config(out: str, tokens: TokenSet, tokenizer: Tokenizer, minutes: float) -> TrainConfig:
    vocabulary = -(-tokenizer.vocab_size // 64) * 64
    shape = ModelConfig(vocab_size=vocabulary, dim=192, layers=4, heads=6, max_positions=256)
    return TrainConfig(
        model=shape,
        data=DataConfig(tokens=str(tokens.folder)),
        batch_tokens=4096,
        budget_minutes=minutes,
        out=os.path.join(out, "run"),
        optimizer=OptimizerConfig(kind="muon", lr=0.01),
        checkpoint_minutes=60,
    )


def _trained(config: TrainConfig, validate: Any) -> RunSummary:
    try:
        return train(config, validate=validate)
    except ConfigError as error:
        # The folder holds a run with other settings, such as another --minutes.
        raise UsageError(error.what, fix="choose another folder with --out, or remove it") from error


def _reserve(test: list[Document], validation: list[Document]) -> tuple[list[Document], list[Document]]:
    """Split off the last test document of each domain with several, so that validation has every domain.

    A domain with a single one, and none in validation, shares it: validation is only shown, it decides nothing.
    """
    last = {document.source: number for number, document in enumerate(test)}
    counts = Counter(document.source for document in test)
    reserved = {number for source, number in last.items() if counts[source] > 1}
    kept = [document for number, document in enumerate(test) if number not in reserved]
    covered = {document.source for document in validation} | {test[number].source for number in reserved}
    shared = [document for document in kept if document.source not in covered]
    return kept, [*(test[number] for number in sorted(reserved)), *shared]


def _few(documents: Iterable[Document], each: int = 2, characters: int = 1500) -> list[Document]:
    """Return the first characters of a few documents of each domain, for fast validation."""
    chosen: dict[str, list[Document]] = {}
    for document in documents:
        of_domain = chosen.setdefault(document.source, [])
        if len(of_domain) < each:
            of_domain.append(Document(document.text[:characters], source=document.source))
    return [document for name in sorted(chosen) for document in chosen[name]]


def _scored(model: Transformer, tokenizer: Tokenizer, documents: list[Document]) -> dict[str, Figures]:
    return summarise(bits_per_byte(TransformerScorer(model), tokenizer, documents))


def _baselines(train_documents: Any, test: list[Document]) -> dict[str, dict[str, float]]:
    frequencies = ByteFrequencies(train_documents)
    groups = {name: [d for d in test if d.source == name] for name in dict.fromkeys(d.source for d in test)}
    groups["all"] = test
    measures: dict[str, Callable[[list[Document]], float]] = {
        "byte frequencies": frequencies.bits,
        "zstd -22": zstd_bits,
        "xz -9e": xz_bits,
    }
    return {name: {domain: bits(documents) for domain, documents in groups.items()} for name, bits in measures.items()}


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    seconds[name] = time.monotonic() - begun
