"""Constraints of a step's rows: masks of tokens are computed on the host and applied on the device at once."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any, Protocol

import torch
from torch import Tensor

from piledriver.kernels.sampling import mask_tokens
from piledriver.serve.execution.inputs import SampleRow
from piledriver.serve.request import Constraint


class Constrained(Protocol):
    """What is sampled in a row."""

    constraint: Constraint | None


def apply_constraints(logits: Tensor, rows: Rows[SampleRow], answers: Rows[Constrained]) -> dict[int, str]:
    """Set logits of [rows, vocab] to -inf where a row's constraint does not allow the token, in place.

    Return the rows whose constraint raised an error, with the reason: a constraint is the caller's code, and its error
    ends its own request only.
    """
    if all(answer.constraint is None for answer in answers):
        return {}
    # Pinned, so that the copy does not wait for the forward pass.
    words = torch.empty(len(answers), mask_words(logits.shape[1]), dtype=torch.int32, pin_memory=logits.is_cuda)
    failures = fill_masks(words.numpy(), rows, answers)
    every = torch.arange(len(answers), device=logits.device)
    mask_tokens(logits, every, words.to(logits.device, non_blocking=True))
    return failures


def mask_words(vocab: int) -> int:
    """Return the 32-bit words of a mask."""
    return -(-vocab // 32)


def fill_masks(masks: Any, rows: Rows[SampleRow], answers: Rows[Constrained]) -> dict[int, str]:
    """Fill [rows, words] (numpy int32) with the allowed tokens of each row, all of them where nothing constrains it.

    Return the errors of single rows. Constraints of a class that has `fill_masks` are filled together.
    """
    together: dict[type, list[int]] = {}
    errors: dict[int, Exception] = {}
    for at, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        constraint = answer.constraint
        if constraint is None or constraint.finished:
            masks[at] = -1
        elif hasattr(constraint, "fill_masks") and not row.draft:
            together.setdefault(type(constraint), []).append(at)
        else:
            try:
                _fill_row(masks[at], row, constraint)
            except Exception as error:
                errors[at] = error
    for kind, group in together.items():
        many: Any = kind
        errors |= many.fill_masks({at: answers[at].constraint for at in group}, masks)
    for at in errors:
        masks[at] = -1
    return {at: f"{type(error).__name__}: {error}" for at, error in errors.items()}


def _fill_row(mask: Any, row: SampleRow, constraint: Constraint) -> None:
    for token in row.draft:
        constraint.accept(token)
    try:
        mask[:] = 0
        constraint.fill_mask(mask)
    finally:
        if row.draft:
            constraint.rollback(len(row.draft))
