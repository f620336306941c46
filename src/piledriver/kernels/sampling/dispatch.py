"""Draw tokens with the fastest kernel that runs on the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from piledriver.kernels.registry import fastest_kernel
from piledriver.kernels.sampling.rows import Drawn, RowSettings


def draw_tokens(
    logits: Tensor, settings: RowSettings, raw: Tensor | None = None, *, keep: tuple[Tensor, Tensor] | None = None
) -> Drawn:
    """Return one token for each row of [rows, vocab] logits, with its log-probability.

    Log-probabilities are those of `raw`, the logits before penalties and masks, where it is given. Each row is computed
    in an order that does not depend on the others. `keep` = (last, slots) also stores each token in `last[slot]`.
    """
    kernel: Any = fastest_kernel("sampling", logits.device)
    drawn: Drawn = kernel(logits, settings, logits if raw is None else raw, keep=keep)
    return drawn


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set logits of the given rows of [rows, vocab] to -inf where a bit of `words` is 0, in place.

    `words` is [len(rows), ceil(vocab / 32)] int32: bit i % 32 of word i // 32 belongs to token i.
    """
    kernel: Any = fastest_kernel("sampling", logits.device)
    kernel.mask_tokens(logits, rows, words)


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of one token for each row of [rows, vocab] logits, bit for bit as `draw_tokens`."""
    kernel: Any = fastest_kernel("sampling", logits.device)
    found: Tensor = kernel.token_logprobs(logits, tokens)
    return found
