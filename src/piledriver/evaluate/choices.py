"""Multiple choice by log-likelihood: which continuation does the model find most likely?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from piledriver.data.tokenizer import Tokenizer
from piledriver.evaluate.scorers import Scorer


@dataclass(frozen=True)
class Choice:
    """One question with its answers."""

    context: str
    answers: tuple[str, ...]
    correct: int


@dataclass(frozen=True)
class ChoiceResult:
    """How often the right answer was the likeliest: as it is, and for each byte of its length."""

    questions: int
    accuracy: float
    accuracy_by_bytes: float


def continuation_nats(scorer: Scorer, tokenizer: Tokenizer, context: str, continuation: str) -> float:
    """Negative log-likelihood of the continuation.

    Context and continuation are encoded together and cut where the context's own tokens end, so that a token across the
    border is scored with the continuation. What does not fit the window is cut from the left.
    """
    whole = tokenizer.encode(context + continuation)
    border = len(tokenizer.encode(context)) if context else 0
    sequence = np.concatenate([[tokenizer.boundary()], np.asarray(whole, np.int64)])
    fresh = len(whole) - border
    inputs = sequence[:-1][-scorer.length :]
    targets = np.full(len(inputs), -100)
    fresh = min(fresh, len(inputs))
    targets[len(inputs) - fresh :] = sequence[len(sequence) - fresh :]
    batch = torch.from_numpy(np.ascontiguousarray(inputs))[None].to(scorer.device)
    losses = scorer.losses(batch, torch.from_numpy(targets)[None].to(scorer.device))
    return float(losses.double().sum())


def multiple_choice(scorer: Scorer, tokenizer: Tokenizer, choices: Sequence[Choice]) -> ChoiceResult:
    """Accuracy over some questions."""
    right = right_by_bytes = 0
    for choice in choices:
        nats = [continuation_nats(scorer, tokenizer, choice.context, answer) for answer in choice.answers]
        sizes = [max(1, len(answer.encode("utf-8"))) for answer in choice.answers]
        right += int(np.argmin(nats)) == choice.correct
        right_by_bytes += int(np.argmin(np.array(nats) / np.array(sizes))) == choice.correct
    count = max(1, len(choices))
    return ChoiceResult(len(choices), right / count, right_by_bytes / count)
