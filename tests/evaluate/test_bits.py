"""Law 7: bits per byte do not depend on batch size, padding, process count or bookkeeping; every byte counted once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.core.errors import UsageError
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.evaluate import (
    Choice,
    DocumentScore,
    TransformerScorer,
    TransformersScorer,
    bits_per_byte,
    multiple_choice,
    summarise,
)
from piledriver.evaluate.report import as_json, as_text, paper_figures, save_chart
from piledriver.evaluate.windows import rolling_windows
from piledriver.models import Transformer

from .conftest import DOCUMENTS


def brute_force(model: Transformer, tokenizer: Tokenizer, text: str, length: int) -> float:
    """One token at a time, each from exactly the tokens that the definition gives it."""
    sequence = [tokenizer.boundary(), *tokenizer.encode(text).tolist()]
    total = len(sequence) - 1
    nats, scored = 0.0, 0
    while scored < total:
        end = min(total, scored + length)
        begin = max(0, end - length)
        for at in range(scored, end):
            with torch.no_grad():
                logits = model(torch.tensor([sequence[begin : at + 1]]))[0, -1].double()
            nats -= float(logits.log_softmax(-1)[sequence[at + 1]])
        scored = end
    return nats


def test_it_equals_one_token_at_a_time(model: Transformer, tokenizer: Tokenizer) -> None:
    scores = bits_per_byte(TransformerScorer(model), tokenizer, DOCUMENTS)
    for score, document in zip(scores, DOCUMENTS, strict=True):
        assert score.nats == pytest.approx(brute_force(model, tokenizer, document.text, 16), rel=1e-5, abs=1e-4)
        assert score.bytes == len(document.text.encode())
    figures = summarise(scores)
    expected = sum(score.nats for score in scores) / sum(score.bytes for score in scores) / math.log(2)
    assert figures["all"].bits_per_byte == pytest.approx(expected, rel=1e-12)
    assert set(figures) == {"A", "B", "Github", "all"}
    assert figures["A"].documents == 2
    assert figures["A"].low <= figures["A"].bits_per_byte <= figures["A"].high


@pytest.mark.parametrize("batch_tokens", [1, 16, 50, 10_000])
def test_batch_size_and_padding_leave_no_trace(batch_tokens: int, model: Transformer, tokenizer: Tokenizer) -> None:
    one = bits_per_byte(TransformerScorer(model), tokenizer, DOCUMENTS, batch_tokens=1)
    other = bits_per_byte(TransformerScorer(model), tokenizer, DOCUMENTS, batch_tokens=batch_tokens)
    assert [score.nats for score in other] == pytest.approx([score.nats for score in one], rel=1e-5)


def test_the_plain_model_of_transformers_gives_the_same(tmp_path: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    from piledriver.models.interchange import load_folder

    config = transformers.GPT2Config(
        vocab_size=tokenizer.vocab_size, n_embd=32, n_layer=2, n_head=2, n_positions=16, initializer_range=0.3
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    scores = [
        bits_per_byte(scorer, tokenizer, DOCUMENTS)
        for scorer in (TransformersScorer(theirs), TransformerScorer(load_folder(tmp_path)))
    ]
    assert [s.nats for s in scores[0]] == pytest.approx([s.nats for s in scores[1]], rel=1e-4)


@given(
    ids=st.lists(st.integers(1, 1000), max_size=60),
    length=st.integers(1, 20),
    context=st.integers(1, 20),
)
def test_every_token_is_scored_once_after_enough_context(ids: list[int], length: int, context: int) -> None:
    if context > length:
        with pytest.raises(UsageError):
            list(rolling_windows(0, [1], 0, length, context))
        return
    sequence = [0, *ids]
    scored = []
    for window in rolling_windows(0, np.array(ids, np.int64), 0, length, context):
        assert len(window.inputs) <= length
        counted = window.targets != -100
        fresh = int(counted.sum())
        assert counted[len(counted) - fresh :].all()
        at = len(scored)
        scored += window.targets[counted].tolist()
        assert window.inputs.tolist() == sequence[at + fresh - len(window.inputs) : at + fresh]
        if at:
            assert len(window.inputs) - fresh >= context - 1
    assert scored == ids


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_sums_do_not_depend_on_the_order_of_the_documents(seed: int) -> None:
    from piledriver.evaluate import DocumentScore

    random = np.random.default_rng(seed)
    scores = [
        DocumentScore(i, "S", float(random.exponential(1e3)), 10, int(random.integers(1, 999)), 5) for i in range(50)
    ]
    mixed = [scores[i] for i in random.permutation(50)]
    values = [summarise(order, resamples=0)["all"].bits_per_byte for order in (scores, mixed)]
    assert values[0] == values[1], "to the last digit"


def test_reports_show_the_papers_figures_as_the_papers(
    model: Transformer, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    figures = summarise(bits_per_byte(TransformerScorer(model), tokenizer, DOCUMENTS))
    assert paper_figures()["Github"]["gpt2-small"] == 1.7912
    assert "the paper's" in as_text(figures)
    assert "1.7912 / 0.5635" in as_text(figures)
    rows = json.loads(json.dumps(as_json(figures, model="m")))["bits_per_byte"]
    assert rows["Github"]["paper"]["gpt3-davinci"] == 0.5635
    assert rows["A"]["paper"] is None
    save_chart(figures, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_the_likelier_answer_wins(model: Transformer, tokenizer: Tokenizer) -> None:
    scorer = TransformerScorer(model)
    context, answers = "The quick", (" brown fox", " 東京", " café")
    nats = [
        brute_force(model, tokenizer, context + answer, 16) - brute_force_prefix(model, tokenizer, context, answer)
        for answer in answers
    ]
    best = int(np.argmin(nats))
    assert multiple_choice(scorer, tokenizer, [Choice(context, answers, best)]).accuracy == 1.0
    assert multiple_choice(scorer, tokenizer, [Choice(context, answers, (best + 1) % 3)]).accuracy == 0.0


def brute_force_prefix(model: Transformer, tokenizer: Tokenizer, context: str, answer: str) -> float:
    """Nats of the tokens that belong to the context when it is encoded with its answer."""
    sequence = [tokenizer.boundary(), *tokenizer.encode(context + answer).tolist()]
    border = len(tokenizer.encode(context))
    with torch.no_grad():
        log_p = model(torch.tensor([sequence[:-1]]))[0].double().log_softmax(-1)
    return -float(sum(log_p[i, sequence[i + 1]] for i in range(border)))


def test_the_interval_covers_with_few_documents_of_different_lengths() -> None:
    """Nominal 95%: percentiles of the resampled figure cover 0.88 of such draws."""
    draws, documents, hits = np.random.default_rng(0), 12, 0
    population = np.random.default_rng(1)
    true = _rates_and_sizes(population, 2_000_000)
    truth = float((true[0] * true[1]).sum() / true[1].sum()) / math.log(2)
    for _ in range(600):
        rates, sizes = _rates_and_sizes(draws, documents)
        scores = [
            DocumentScore(number, "a", float(rate * size), 1, int(size), 1)
            for number, (rate, size) in enumerate(zip(rates, sizes, strict=True))
        ]
        row = summarise(scores, resamples=200)["all"]
        hits += row.low <= truth <= row.high
    assert 0.93 <= hits / 600 <= 0.97


def _rates_and_sizes(random: np.random.Generator, count: int) -> tuple[Any, Any]:
    sizes = np.exp(random.normal(7.0, 0.5, count)).round() + 1
    return np.exp(random.normal(0.0, 0.4, count)) * (sizes / 1000) ** -0.1, sizes
