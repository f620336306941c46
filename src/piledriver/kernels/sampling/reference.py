"""Sampling in plain torch, row by row, by inverting the cumulative distribution over tokens in order of their ids."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from piledriver.kernels.registry import Kernel
from piledriver.kernels.sampling.rows import Drawn, RowSettings


class ReferenceSampling(Kernel):
    """The formulas. One row at a time: then its bits do not depend on how many rows there are."""

    def __call__(
        self, logits: Tensor, settings: RowSettings, raw: Tensor, *, keep: tuple[Tensor, Tensor] | None = None
    ) -> Drawn:
        if not settings.temperature.any():  # a comparison has no order of sums
            tokens = _most_likely(logits)
            if keep is not None:
                keep[0][keep[1].long()] = tokens
            return Drawn(tokens, self.token_logprobs(raw, tokens))
        columns = (settings.temperature, settings.uniform, settings.top_k, settings.top_p, settings.min_p)
        cut = settings.truncates
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        drawn = [
            draw_row(logits[at].float(), temperature, uniform, *((int(top_k), top_p, min_p) if cut else (0, 1.0, 0.0)))
            for at, (temperature, uniform, top_k, top_p, min_p) in enumerate(rows)
        ]
        tokens = torch.tensor(drawn, device=logits.device)
        if keep is not None:
            keep[0][keep[1].long()] = tokens
        return Drawn(tokens, self.token_logprobs(raw, tokens))

    def mask_tokens(self, logits: Tensor, rows: Tensor, words: Tensor) -> None:
        """Set logits to -inf where a bit of `words` is 0."""
        bits = torch.arange(32, dtype=torch.int32, device=words.device)
        allowed = ((words[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
        logits[rows] = logits[rows].masked_fill(allowed == 0, -torch.inf)

    def token_logprobs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probability of one token for each row."""
        found = [
            row[token].float() - row_logsumexp(row.float()) for row, token in zip(logits, tokens.tolist(), strict=True)
        ]
        return torch.stack(found)


def row_logsumexp(row: Tensor) -> Tensor:
    """Return the logarithm of the summed exponentials of [vocab] fp32 logits.

    On a CPU NumPy computes it in the calling thread: waking other threads for one row takes longer.
    """
    if not row.is_cpu or row.requires_grad:
        return row.logsumexp(dim=-1)
    logits = row.numpy()
    highest = logits.max()
    if not np.isfinite(highest):
        return row.logsumexp(dim=-1)
    return torch.from_numpy(np.asarray(highest + np.log(np.exp(logits - highest).sum())))


def _most_likely(logits: Tensor) -> Tensor:
    """Return the first largest logit of each row; NumPy compares vectors of fp32 on a CPU, torch single numbers."""
    if logits.dtype != torch.float32 or not logits.is_cpu:
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def draw_row(logits: Tensor, temperature: float, uniform: float, top_k: int, top_p: float, min_p: float) -> int:
    """Return one token of [vocab] fp32 logits."""
    if temperature == 0:
        return int(logits.argmax())
    kept = truncate_row(logits / temperature, top_k, top_p, min_p)
    masses = (kept - kept.max()).exp()
    cumulative = masses.double().cumsum(dim=-1)
    point = uniform * float(cumulative[-1])
    token = int(torch.searchsorted(cumulative, point, right=True))
    # Rounding may put the point on the very end: the last token that has any mass.
    return token if token < len(masses) else int(masses.nonzero()[-1])


def truncate_row(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return [vocab] logits with -inf for what top-k, top-p and min-p cut off, applied in this order.

    Equal logits are kept or cut together, so that the result does not depend on how a sort orders them.
    """
    if 0 < top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], -torch.inf)
    if top_p < 1.0:
        ordered = scaled.softmax(dim=-1).sort(descending=True).values
        before = ordered.double().cumsum(dim=-1) - ordered
        least = ordered[before < top_p][-1]
        scaled = scaled.masked_fill(scaled.softmax(dim=-1) < least, -torch.inf)
    if min_p > 0.0:
        probabilities = scaled.softmax(dim=-1)
        scaled = scaled.masked_fill(probabilities < min_p * probabilities.max(), -torch.inf)
    return scaled
