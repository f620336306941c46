"""Constraints of a step's rows: masks are computed together on the host and applied on the device at once."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any, Protocol

import numpy as np
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
    held = [
        (position, answer.constraint)
        for position, answer in enumerate(answers)
        if answer.constraint is not None and not answer.constraint.finished
    ]
    if not held:
        return {}
    # Pinned, so that the copies do not wait for the forward pass.
    pinned = logits.is_cuda
    words = torch.zeros(len(held), -(-logits.shape[1] // 32), dtype=torch.int32, pin_memory=pinned)
    places = torch.tensor([position for position, _ in held], pin_memory=pinned)
    errors = _fill_masks(words.numpy(), [(rows[position], constraint) for position, constraint in held])
    for at in errors:
        words[at] = -1
    mask_tokens(logits, *(tensor.to(logits.device, non_blocking=True) for tensor in (places, words)))
    return {held[at][0]: f"{type(error).__name__}: {error}" for at, error in errors.items()}


def _fill_masks(masks: Any, held: list[tuple[SampleRow, Constraint]]) -> dict[int, Exception]:
    """Fill a mask for each row; return the errors of single rows. Constraints of one class are filled together."""
    together: dict[type, list[int]] = {}
    errors: dict[int, Exception] = {}
    for at, (row, constraint) in enumerate(held):
        if hasattr(constraint, "fill_masks") and not row.draft:
            together.setdefault(type(constraint), []).append(at)
            continue
        try:
            _fill_row(masks[at], row, constraint)
        except Exception as error:
            errors[at] = error
    for kind, group in together.items():
        many: Any = kind
        filled = masks if len(group) == len(held) else np.zeros((len(group), masks.shape[1]), dtype=masks.dtype)
        failed = many.fill_masks([held[at][1] for at in group], filled)
        if filled is not masks:
            masks[group] = filled
        errors |= {group[at]: error for at, error in failed.items()}
    return errors


def _fill_row(mask: Any, row: SampleRow, constraint: Constraint) -> None:
    for token in row.draft:
        constraint.accept(token)
    try:
        constraint.fill_mask(mask)
    finally:
        if row.draft:
            constraint.rollback(len(row.draft))
