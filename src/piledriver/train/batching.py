"""One number from the user, the tokens of a global batch; windows, micro-batches and accumulation by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.core.errors import ConfigError

# What one process takes at once where nothing is said: enough to keep the device busy, little enough to fit.
_MICRO_TOKENS = {"cpu": 4096, "cuda": 32768}


@dataclass(frozen=True)
class Batching:
    """How a global batch is cut."""

    seq_len: int
    windows_per_step: int
    windows_per_micro_batch: int
    accumulation: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.windows_per_step * self.seq_len


def cut_batch(batch_tokens: int, seq_len: int, processes: int, micro_batch_tokens: int | None, device: str) -> Batching:
    """Cut a global batch over processes and time.

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
            f"{windows} windows a step cannot be shared by {processes} processes", fix=f"use batch_tokens={near}"
        )
    mine = windows // processes
    most = max(1, (micro_batch_tokens or _MICRO_TOKENS.get(device, 16384)) // seq_len)
    micro = max(count for count in range(1, mine + 1) if mine % count == 0 and count <= most)
    return Batching(seq_len, windows, micro, mine // micro)
