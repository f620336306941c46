"""`TokenStream`: an endless stream of windows, exactly shuffled and mixed, with random access in constant time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from piledriver.core.errors import ConfigError, UnknownNameError
from piledriver.data.cursor import Cursor
from piledriver.data.stream.mixture import Mixture, windows_by_weight
from piledriver.data.stream.windows.batch import WindowBatch
from piledriver.data.stream.windows.contiguous import ContiguousWindows
from piledriver.data.stream.windows.locations import WindowLocations, ranges_by_source
from piledriver.data.stream.windows.packed import PackedWindows
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.data.tokens.shard import Check
from piledriver.data.tokens.token_set import TokenSet, open_tokens

Packing = Literal["packed", "joined", "document", "best_fit"]


def masks_documents(packing: Packing) -> bool:
    """Return whether attention must not cross documents in windows of this packing."""
    return packing != "joined"


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Which windows, in which order."""

    tokens: str
    """Folder of the token shards."""
    seq_len: int = 2048
    """Tokens that a window predicts."""
    seed: int = 0
    """Seed of the shuffle."""
    packing: Packing = "packed"
    """`packed`: documents end to end, with a document mask; `joined`: end to end without a mask; `document`: one
    document (or part) per window, padded; `best_fit`: documents (or parts) packed with the least padding, masked."""
    mixture: dict[str, float] | None = None
    """Weight of each source in every epoch; sources that are not named are excluded. null: every window once."""
    exclude_sources: tuple[str, ...] = ()
    """Sources to exclude."""
    exclude_licences: tuple[str, ...] = ()
    """Licences to exclude."""
    epoch_windows: int | None = None
    """Windows in an epoch of a mixture; default: as many as its sources have."""

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ConfigError(f"seq_len is {self.seq_len}", fix="it must be 1 or more")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}", fix="it must be from 0 to 2**63 - 1")
        if self.epoch_windows is not None and (self.mixture is None or self.epoch_windows < 1):
            raise ConfigError(
                f"epoch_windows is {self.epoch_windows} and mixture {self.mixture}",
                fix="give a mixture and a positive epoch_windows, or leave epoch_windows out",
            )

    @property
    def masks_documents(self) -> bool:
        """Whether attention must not cross documents."""
        return masks_documents(self.packing)


class TokenStream:
    """Windows by their index in an endless stream of epochs.

    Window i is a pure function of the shards, the config and i: any rank can read any window at any time.
    """

    def __init__(self, config: StreamConfig, tokens: TokenSet) -> None:
        self.config, self.tokens = config, tokens
        self.windows = _make_windows(config, tokens)
        self.mixture = Mixture(self.windows.counts, self._epoch_counts(), config.seed)
        # Windows that are located together: more if a block is spread over many shards, fewer if it would span epochs.
        self._block_size = min(max(1 << 14, 64 * len(tokens.shards)), max(64, self.epoch_windows))
        self._blocks: dict[int, WindowLocations] = {}

    @property
    def epoch_windows(self) -> int:
        """Windows in one epoch."""
        return self.mixture.epoch_windows

    @property
    def start(self) -> Cursor:
        """The cursor at the start of the stream."""
        return Cursor(seed=self.config.seed)

    def advance(self, cursor: Cursor, windows: int) -> Cursor:
        """Return the cursor after `windows` more windows."""
        epoch, index = divmod(self.index_of(cursor) + windows, self.epoch_windows)
        return Cursor(seed=cursor.seed, epoch=epoch, index=index)

    def index_of(self, cursor: Cursor) -> int:
        """Return a cursor's index in the endless stream."""
        if cursor.seed != self.config.seed:
            raise ConfigError(
                f"the cursor has seed {cursor.seed}, the stream has {self.config.seed}",
                fix=f"set seed={cursor.seed} to resume, or start a new run",
            )
        return cursor.epoch * self.epoch_windows + cursor.index

    def read(self, start: int, count: int) -> WindowBatch:
        """Return `count` windows from an index of the endless stream on."""
        parts: list[WindowLocations] = []
        while count > 0 or not parts:
            number, low = divmod(start, self._block_size)
            taken = min(count, self._block_size - low)
            parts.append(self._block(number).slice(low, low + taken))
            start, count = start + taken, count - taken
        return self.windows.read(parts[0] if len(parts) == 1 else WindowLocations.concatenate(parts))

    def read_at(self, indices: npt.NDArray[np.int64]) -> WindowBatch:
        """Return the windows at any indices of the endless stream."""
        return self.windows.read(self._locate(np.asarray(indices, dtype=np.int64)))

    def describe(self) -> dict[str, Any]:
        """Return what an epoch holds, and what is lost to cutting and padding."""
        counts = dict(zip(self.mixture.names, self.mixture.epoch_counts.tolist(), strict=True))
        return {
            "windows": self.epoch_windows,
            "tokens": self.epoch_windows * self.config.seq_len,
            "windows_by_source": counts,
            "passes_by_source": {name: counts[name] / count for name, count in self.windows.counts.items() if count},
            "dropped_tokens": self.windows.dropped_tokens,
            "padding": self.windows.padding,
        }

    def _block(self, number: int) -> WindowLocations:
        """Return the locations of a block of indices, cached: locating many windows at once is cheaper."""
        block = self._blocks.get(number)
        if block is None:
            first = number * self._block_size
            block = self._locate(np.arange(first, first + self._block_size, dtype=np.int64))
            if len(self._blocks) >= 4:
                self._blocks.pop(next(iter(self._blocks)), None)
            self._blocks[number] = block
        return block

    def _locate(self, indices: npt.NDArray[np.int64]) -> WindowLocations:
        return self.windows.locate(*self.mixture.locate(indices))

    def _epoch_counts(self) -> dict[str, int]:
        available = self.windows.counts
        if self.config.mixture is None:
            return available
        weights = {name: weight for name, weight in self.config.mixture.items() if name in available and weight > 0}
        return windows_by_weight(weights, self.config.epoch_windows or sum(available.values()))


def open_stream(
    config: StreamConfig,
    *,
    check: Check = "index",
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
) -> TokenStream:
    """Open and check the token shards that a config names; return their stream."""
    tokens = open_tokens(config.tokens, check=check, tokenizer=tokenizer, vocab_size=vocab_size)
    return TokenStream(config, tokens)


def _make_windows(config: StreamConfig, tokens: TokenSet) -> ContiguousWindows | PackedWindows:
    sources, licences = tokens.sources, tokens.licences
    for kind, names, known in (
        ("source", config.exclude_sources, sources),
        ("licence", config.exclude_licences, licences),
        ("source", tuple(config.mixture or ()), sources),
    ):
        for name in names:
            if name not in known:
                raise UnknownNameError(kind, name, known)
    excluded = set(config.exclude_sources)
    if config.mixture is not None:
        excluded |= {name for name in sources if not config.mixture.get(name)}
    ranges = ranges_by_source(tokens, frozenset(excluded), frozenset(config.exclude_licences))
    if config.packing in ("packed", "joined"):
        return ContiguousWindows(tokens, ranges, config.seq_len, find_documents=config.masks_documents)
    return PackedWindows(tokens, ranges, config.seq_len, pack=config.packing == "best_fit")
