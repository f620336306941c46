"""Cut a global batch, given in tokens, into windows, micro-batches and accumulation steps."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.core.errors import ConfigError

# Default tokens of a micro-batch: enough to keep the device busy, few enough to fit.
_MICRO_TOKENS = {"cpu": 4096, "cuda": 32768}


@dataclass(frozen=True)
class Batching:
    """A global batch in windows, micro-batches and accumulation steps."""

    seq_len: int
    windows_per_step: int
    windows_per_micro_batch: int
    accumulation: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.windows_per_step * self.seq_len


def cut_batch(batch_tokens: int, seq_len: int, processes: int, micro_batch_tokens: int | None, device: str) -> Batching:
    """Return how a global batch is divided over ranks and accumulation steps.

    >>> cut_batch(65536, 1024, processes=2, micro_batch_tokens=8192, device="cpu")
    Batching(seq_len=1024, windows_per_step=64, windows_per_micro_batch=8, accumulation=4)
    """
    windows, rest = divmod(batch_tokens, seq_len)
    if rest or windows == 0:
        near = max(1, round(batch_tokens / seq_len)) * seq_len
        raise ConfigError(f"batch_tokens {batch_tokens} is not a multiple of seq_len {seq_len}", fix=f"use {near}")
    if windows % processes:
        near = max(1, round(windows / processes)) * processes * seq_len
        raise ConfigError(
            f"batch_tokens {batch_tokens} is {windows} windows, which {processes} data-parallel ranks do not divide",
            fix=f"use batch_tokens={near}",
        )
    mine = windows // processes
    most = max(1, (micro_batch_tokens or _MICRO_TOKENS.get(device, 16384)) // seq_len)
    micro = max(count for count in range(1, mine + 1) if mine % count == 0 and count <= most)
    return Batching(seq_len, windows, micro, mine // micro)
