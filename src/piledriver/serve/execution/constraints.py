"""Constraints of a step's rows: masks are computed in parallel threads and applied on the device at once."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence as Rows
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from piledriver.kernels.sampling import mask_tokens
from piledriver.serve.execution.inputs import SampleRow
from piledriver.serve.request import Constraint

_MOST_THREADS = 16


class Constrained(Protocol):
    """What is sampled in a row."""

    constraint: Constraint | None


def apply_constraints(logits: Tensor, rows: Rows[SampleRow], answers: Rows[Constrained]) -> dict[int, str]:
    """Set logits of [rows, vocab] to -inf where a row's constraint does not allow the token, in place.

    Return the rows whose constraint raised an error, with the reason: a constraint is the caller's code, and its error
    ends its own request only.
    """
    # Rows of one sequence (draft tokens) share a constraint, which one thread at a time may use.
    owners: dict[int, list[int]] = {}
    for position, answer in enumerate(answers):
        if answer.constraint is not None and not answer.constraint.finished:
            owners.setdefault(id(answer.constraint), []).append(position)
    if not owners:
        return {}
    places = [position for group in owners.values() for position in group]
    words = np.zeros((len(places), -(-logits.shape[1] // 32)), dtype=np.int32)
    failures: dict[int, str] = {}

    def fill(first: int, group: list[int]) -> None:
        for offset, position in enumerate(group):
            constraint = answers[position].constraint
            assert constraint is not None
            try:
                _fill_row(words[first + offset], rows[position], constraint)
            except Exception as error:
                failures[position] = f"{type(error).__name__}: {error}"
                words[first + offset] = -1

    starts = np.cumsum([0, *(len(group) for group in owners.values())]).tolist()
    tasks = list(zip(starts, owners.values(), strict=False))
    if len(tasks) == 1:
        fill(*tasks[0])
    else:
        list(_threads().map(lambda task: fill(*task), tasks))
    _mask_rows(logits, places, words)
    return failures


def _fill_row(words: Any, row: SampleRow, constraint: Constraint) -> None:
    for token in row.draft:
        constraint.accept(token)
    try:
        constraint.fill_mask(words)
    finally:
        if row.draft:
            constraint.rollback(len(row.draft))


def _mask_rows(logits: Tensor, places: list[int], words: Any) -> None:
    rows = np.array(places, dtype=np.int64)
    # From pinned memory: another copy would wait for the forward pass.
    mask_tokens(logits, *(_to_device(torch.from_numpy(array), logits.device) for array in (rows, words)))


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="piledriver-masks")
