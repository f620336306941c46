"""Measure a dense model and what was made of it, and write the report as JSON and HTML."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from piledriver.compress.comparison.page import comparison_page
from piledriver.compress.measure import paired_change
from piledriver.core import storage
from piledriver.core.errors import UsageError
from piledriver.core.progress import track
from piledriver.data.tokenizer.open import NoTokenizerError, open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.evaluate import DocumentScore, Figures, TransformerScorer, bits_per_byte, summarise
from piledriver.evaluate.validation import read_spread
from piledriver.models import Transformer
from piledriver.models.interchange import load_folder
from piledriver.serve import Engine, SamplingParams

if TYPE_CHECKING:
    from piledriver.corpus import Document

BATCHES = (1, 32)
_NEW_TOKENS = 32
_PROMPT = 16


def compare_models(
    models: Mapping[str, Transformer | str] | Sequence[str],
    corpus: str | Sequence[Document],
    *,
    tokenizer: Tokenizer | str | None = None,
    documents: int = 100,
    out: str | None = None,
    device: torch.device | str | None = None,
    speed: bool = True,
    new_tokens: int = _NEW_TOKENS,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Compare models with the first of them, and return the report; with `out`, write report.html and report.json.

    `models` are folders or models by name. Each is measured on the same documents of a corpus, spread evenly: bits per
    byte by source with 95% intervals, the change against the first model with the interval of paired differences,
    stored bytes, decoded tokens per second at batch 1 and 32, and what its records say: error of each layer, layers
    that were skipped and why. Unless a tokenizer is given, each folder's own is used, or that of the first folder that
    has one.
    """
    named = dict(models) if isinstance(models, Mapping) else _named(models)
    if not named:
        raise UsageError("there is no model to report on", fix="name at least one model folder")
    if documents < 1:
        raise UsageError(f"documents is {documents}", fix="give 1 or more")
    if out is not None:
        storage.require_writable(out)
    chosen = list(corpus) if not isinstance(corpus, str) else read_spread(corpus, documents)
    if not chosen:
        raise UsageError(f"{corpus} holds no documents", fix="give text shards of unseen text")
    tokenizers = _tokenizers(tokenizer, named)
    place = torch.device(device) if device is not None else _default_device()
    rows: list[dict[str, Any]] = []
    first: list[DocumentScore] | None = None
    shown = track(named.items(), "report", total=len(named), unit="models") if show_progress else named.items()
    for name, given in shown:
        model = load_folder(given) if isinstance(given, str) else given
        model = model.to(place).eval()
        scores = bits_per_byte(TransformerScorer(model), tokenizers[name], chosen)
        figures = summarise(scores)
        row: dict[str, Any] = {
            "name": name,
            "folder": given if isinstance(given, str) else None,
            "parameters": _parameters(model),
            "bytes": _folder_bytes(given) if isinstance(given, str) else stored_bytes(model),
            "bits_per_byte": {source: _plain(figure) for source, figure in figures.items()},
            "change": None if first is None else _finite(paired_change(first, scores)),
            "tokens_per_second": measure_speed(model, new_tokens=new_tokens) if speed else {},
            "records": model.compression,
        }
        first = scores if first is None else first
        rows.append(row)
        del model
    report = {"device": _device_name(place), "documents": len(chosen), "models": rows}
    if out is not None:
        storage.make_folder(out)
        storage.write_text(storage.join(out, "report.json"), json.dumps(report, indent=1) + "\n")
        storage.write_text(storage.join(out, "report.html"), comparison_page(report))
    return report


def measure_speed(model: Transformer, *, new_tokens: int = _NEW_TOKENS) -> dict[str, float]:
    """Return decoded tokens per second of a served model, by batch size; the second of two runs counts."""
    speeds = {}
    length = min(model.config.max_positions - 1, _PROMPT + new_tokens)
    count = max(1, length - _PROMPT)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    for batch in BATCHES:
        engine = Engine(model, max_sequences=batch, max_context=length)
        prompts = [[(7 * row + token) % model.config.vocab_size for token in range(_PROMPT)] for row in range(batch)]
        for _ in range(2):
            begun = time.perf_counter()
            done = engine.generate(prompts, params)
            seconds = time.perf_counter() - begun
        decoded = sum(len(output.completions[0].token_ids) for output in done)
        speeds[str(batch)] = round(decoded / seconds, 2)
        engine.stop()
    return speeds


def stored_bytes(model: Transformer) -> int:
    """Return the bytes of a model's parameters and quantised weights."""
    tensors = {tensor.data_ptr(): tensor for tensor in model.parameters()}
    for module in model.modules():
        for name in ("weight", "scales", "zeros"):
            buffer = dict(module.named_buffers(recurse=False)).get(name)
            if buffer is not None:
                tensors[buffer.data_ptr()] = buffer  # type: ignore[assignment]
    return sum(tensor.nbytes for tensor in tensors.values())


def _parameters(model: Transformer) -> int:
    from piledriver.models.model_size import parameter_count

    return parameter_count(model.config)


def _folder_bytes(folder: str) -> int:
    return sum(storage.size(path) for path in storage.files_below(folder) if path.endswith(".safetensors"))


def _tokenizers(given: Tokenizer | str | None, models: Mapping[str, Any]) -> dict[str, Tokenizer]:
    """Return the tokenizer of each model."""
    if given is not None:
        return dict.fromkeys(models, given if isinstance(given, Tokenizer) else open_tokenizer(given))
    found: dict[str, Tokenizer] = {}
    for name, folder in models.items():
        if isinstance(folder, str):
            with suppress(NoTokenizerError):
                found[name] = open_tokenizer(folder)
    if not found:
        raise UsageError(f"no tokenizer in {', '.join(map(str, models))}", fix="give tokenizer")
    return dict.fromkeys(models, next(iter(found.values()))) | found


def _named(folders: Sequence[str]) -> dict[str, str]:
    """Return folders by short names; those that would share one are named in full.

    >>> _named(["a/small", "b/small", "runs/x/model"])
    {'a/small': 'a/small', 'b/small': 'b/small', 'x/model': 'runs/x/model'}
    """
    distinct = list(dict.fromkeys(folders))
    names = [_short(folder) for folder in distinct]
    return {folder if names.count(name) > 1 else name: folder for name, folder in zip(names, distinct, strict=True)}


def _short(folder: str) -> str:
    parts = os.path.normpath(folder).split(os.sep)
    return "/".join(parts[-2:]) if parts[-1] == "model" else parts[-1]


def _plain(row: Figures) -> dict[str, Any]:
    return {
        "bits_per_byte": _number(row.bits_per_byte),
        "low": _number(row.low),
        "high": _number(row.high),
        "documents": row.documents,
        "bytes": row.bytes,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _finite(values: tuple[float, ...]) -> list[float | None]:
    return [_number(value) for value in values]


def _default_device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
