"""From logits to tokens: penalties, biases and constraint masks, then the sampling kernel, then log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from piledriver.core.random import Stream
from piledriver.kernels.sampling import Drawn, RowSettings, draw_tokens, token_logprobs
from piledriver.kernels.sampling.reference import row_logsumexp, truncate_row
from piledriver.serve.execution.constraints import apply_constraints
from piledriver.serve.execution.inputs import SampleRow
from piledriver.serve.request import Constraint, SamplingParams, TokenLogprob

_UNIFORMS_AT_ONCE = 256
ALMOST_ONE = 1.0 - 2.0**-24
"""The largest fp32 number below 1: the nearest fp32 of a uniform number may be 1."""


class AnswerSampler:
    """How one answer of a request is sampled: its parameters, its random stream, its constraint."""

    def __init__(
        self,
        params: SamplingParams,
        index: int,
        constraint: Constraint | None = None,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.params, self.constraint = params, constraint
        self.end_ids = end_ids
        """Tokens that are not drawn before `min_tokens`."""
        self.by_temperature = not (
            params.processed
            or params.truncated
            or params.logprobs
            or params.logprobs_mode != "raw"
            or params.min_tokens
        )
        """Whether temperature, random number and constraint alone decide."""
        self.plain = self.by_temperature and constraint is None
        """Whether the token is sampled inside the CUDA graph of a decode step."""
        self.changes_logits = params.processed or constraint is not None or params.min_tokens > 0
        """Whether the logits depend on tokens that the host must know first."""
        self._stream = Stream(params.seed, "generate", index)
        self._uniforms: list[float] = []

    def uniform(self, index: int) -> float:
        """Return the random number of token `index` of the answer: a function of seed, answer and index alone."""
        while index >= len(self._uniforms):
            have = len(self._uniforms)
            self._uniforms += self._stream.uniforms(np.arange(have, have + _UNIFORMS_AT_ONCE)).tolist()
        return self._uniforms[index]


@dataclass
class Sampled:
    """Tokens of a step on their way to the host."""

    drawn: Drawn
    tops: list[list[tuple[int, float]] | None] | None = None
    failures: dict[int, str] = field(default_factory=dict)
    """Rows whose own settings failed (a constraint that raised), with the reason; the other rows are as usual."""


def sample(logits: Tensor, rows: Rows[SampleRow], answers: Rows[AnswerSampler]) -> Sampled:
    """Draw one token from each row of [rows, vocab] logits."""
    changed, failures = logits, {}
    if any(answer.changes_logits for answer in answers):
        changed = logits.to(torch.float32, copy=True)
        for position, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            if answer.params.processed or row.place < answer.params.min_tokens:
                _change(changed[position], row, answer)
        failures = apply_constraints(changed, rows, answers)
    drawn = draw_tokens(changed, row_settings(rows, answers, logits.device), logits)
    return Sampled(drawn, _log_probabilities(logits, changed, drawn, answers), failures)


def row_settings(rows: Rows[SampleRow], answers: Rows[AnswerSampler], device: torch.device) -> RowSettings:
    """Return the settings of each row on the device, in one transfer."""
    params = [answer.params for answer in answers]
    table = np.array(
        [
            [p.temperature for p in params],
            [answer.uniform(row.place) for row, answer in zip(rows, answers, strict=True)],
            [p.top_k for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
        ],
        dtype=np.float32,
    )
    np.minimum(table[1], np.float32(ALMOST_ONE), out=table[1])
    moved = _to_device(table, device)
    return RowSettings(
        moved[0], moved[1], moved[2].to(torch.int32), moved[3], moved[4], any(p.truncated for p in params)
    )


def _to_device(array: Any, device: torch.device) -> Tensor:
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _change(logits: Tensor, row: SampleRow, answer: AnswerSampler) -> None:
    """Apply penalties and biases to one row, in place."""
    params, sequence = answer.params, row.sequence
    tokens = [*sequence.tokens, *row.draft]
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(tokens)), device=logits.device)
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if params.presence_penalty or params.frequency_penalty:
        said, counts = np.unique(np.array(tokens[sequence.prompt_length :], dtype=np.int64), return_counts=True)
        if len(said):
            penalty = params.presence_penalty + params.frequency_penalty * counts
            logits[torch.from_numpy(said).to(logits.device)] -= torch.from_numpy(penalty).to(logits)
    if params.logit_bias:
        places = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[places] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if row.place < params.min_tokens and answer.end_ids:
        logits[torch.tensor(sorted(answer.end_ids), device=logits.device)] = -torch.inf


def _log_probabilities(
    logits: Tensor, changed: Tensor, drawn: Drawn, answers: Rows[AnswerSampler]
) -> list[list[tuple[int, float]] | None] | None:
    """Return the most likely tokens of rows that ask for them, and replace log-probabilities of processed mode."""
    if all(not answer.params.logprobs and answer.params.logprobs_mode == "raw" for answer in answers):
        return None
    tops: list[list[tuple[int, float]] | None] = []
    for position, answer in enumerate(answers):
        params = answer.params
        if params.logprobs is None:
            tops.append(None)
            continue
        if params.logprobs_mode == "processed":
            row = changed[position].float()
            if params.temperature > 0:
                row = truncate_row(row / params.temperature, params.top_k, params.top_p, params.min_p)
            drawn.logprobs[position] = row[drawn.tokens[position]] - row_logsumexp(row)
        else:
            row = logits[position].float()
        tops.append(top_logprobs(row, params.logprobs))
    return tops


def top_logprobs(row: Tensor, count: int) -> list[tuple[int, float]]:
    """Return the `count` most likely tokens of [vocab] logits with their log-probabilities, the most likely first."""
    if count == 0:
        return []
    values, places = row.topk(min(count, len(row)))
    found = (values - row_logsumexp(row)).tolist()
    return [(token, value) for token, value in zip(places.tolist(), found, strict=True) if value > -torch.inf]


def prompt_logprobs(logits: Tensor, targets: list[int], count: int) -> list[TokenLogprob]:
    """Return the log-probability of each target under its row of logits, with the most likely tokens."""
    values = token_logprobs(logits, torch.tensor(targets, device=logits.device)).tolist()
    tops = [top_logprobs(row.float(), count) for row in logits] if count else [[]] * len(targets)
    return [TokenLogprob(*found[:2], tuple(found[2])) for found in zip(targets, values, tops, strict=True)]
