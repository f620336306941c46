"""Multiple choice by log-likelihood: the most likely continuation is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.evaluate.scorers import Scorer
from piledriver.evaluate.windows import batches, continuation_window


@dataclass(frozen=True)
class Choice:
    """A question with its answers and the index of the correct one."""

    context: str
    answers: tuple[str, ...]
    correct: int


@dataclass(frozen=True)
class ChoiceResult:
    """Accuracy by log-likelihood, and by log-likelihood per byte of the answer."""

    questions: int
    accuracy: float
    accuracy_by_bytes: float


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a context and of its continuation.

    Both are encoded as one text and split where the ids of the context alone end, so that a token across the border
    counts as continuation. Trailing spaces of the context move to the continuation. As in the evaluation harness.
    """
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    whole = tokenizer.encode(context + continuation).tolist()
    border = min(len(tokenizer.encode(context)), len(whole) - 1) if context and whole else 0
    return whole[:border], whole[border:]


def multiple_choice(
    scorer: Scorer, tokenizer: Tokenizer, choices: Sequence[Choice], *, batch_tokens: int = 8192
) -> ChoiceResult:
    """Return the accuracy of a model on questions; every context starts with the document boundary token."""
    pairs = [(number, answer) for number, choice in enumerate(choices) for answer in choice.answers]
    windows = []
    for at, (number, answer) in enumerate(pairs):
        context, continuation = encode_pair(tokenizer, choices[number].context, answer)
        windows.append(continuation_window(at, [tokenizer.boundary(), *context], continuation, scorer.length))
    nats = np.zeros(len(pairs))
    for batch, inputs, targets in batches(windows, batch_tokens, scorer.device):
        losses = scorer.losses(inputs, targets).double().sum(dim=1).tolist()
        nats[[window.document for window in batch]] = losses
    right = right_by_bytes = at = 0
    for choice in choices:
        mine = nats[at : at + len(choice.answers)]
        sizes = np.array([max(1, len(answer.encode("utf-8"))) for answer in choice.answers])
        right += int(np.argmin(mine)) == choice.correct
        right_by_bytes += int(np.argmin(mine / sizes)) == choice.correct
        at += len(choice.answers)
    count = max(1, len(choices))
    return ChoiceResult(len(choices), right / count, right_by_bytes / count)
