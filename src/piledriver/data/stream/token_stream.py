"""`TokenStream`: an endless, exactly shuffled, exactly mixed stream of windows, entered anywhere in constant time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from piledriver.core.errors import ConfigError, UnknownNameError
from piledriver.data.cursor import Cursor
from piledriver.data.stream.mixture import Mixture, slots_by_weight
from piledriver.data.stream.mmap_view import OneView
from piledriver.data.stream.window_index import Pieces, Stretches, stretches_by_source
from piledriver.data.stream.window_locations import Places
from piledriver.data.stream.windows import Windows
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.data.tokens.token_set import Check, TokenSet, open_tokens

Array = npt.NDArray[np.int64]
Packing = Literal["packed", "joined", "document", "best_fit"]


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Which windows, in which order."""

    tokens: str
    """The folder of token shards."""
    seq_len: int = 2048
    """Tokens that a window predicts."""
    seed: int = 0
    """Which shuffle."""
    packing: Packing = "packed"
    """`packed`: documents end to end, told apart by a mask; `joined`: end to end without one; `document`: one document
    (or part) per window, padded; `best_fit`: whole documents (or parts) packed with the least padding, masked."""
    mixture: dict[str, float] | None = None
    """Share of each source in every epoch; sources that are not named are left out. None: as much as there is."""
    exclude_sources: tuple[str, ...] = ()
    """Sources to leave out."""
    exclude_licences: tuple[str, ...] = ()
    """Licences to leave out."""
    epoch_windows: int | None = None
    """Windows in an epoch of a mixture; as many as the sources in it have where not given."""

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ConfigError(f"seq_len is {self.seq_len}", fix="it must be 1 or more")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}", fix="it must be from 0 to 2**63 - 1")
        if self.epoch_windows is not None and (self.mixture is None or self.epoch_windows < 1):
            raise ConfigError("epoch_windows needs a mixture, and must be positive", fix="leave it out")


class TokenStream:
    """Windows by their index in the stream, which goes on for as many epochs as anybody asks for.

    Window i is a pure function of the shards, the config and i: any process can ask for any window at any time.
    """

    def __init__(self, config: StreamConfig, tokens: TokenSet) -> None:
        self.config, self.tokens = config, tokens
        known_sources, known_licences = tokens.sources, tokens.licences
        for kind, names, known in (
            ("source", config.exclude_sources, known_sources),
            ("licence", config.exclude_licences, known_licences),
            ("source", tuple(config.mixture or ()), known_sources),
        ):
            for name in names:
                if name not in known:
                    raise UnknownNameError(kind, name, known)
        left_out = set(config.exclude_sources)
        if config.mixture is not None:
            left_out |= {name for name in known_sources if not config.mixture.get(name)}
        lanes = stretches_by_source(tokens, frozenset(left_out), frozenset(config.exclude_licences))
        self.layout: Stretches | Pieces
        if config.packing in ("packed", "joined"):
            self.layout = Stretches(lanes, config.seq_len)
        else:
            self.layout = Pieces(tokens, lanes, config.seq_len, pack=config.packing == "best_fit")
        self.mixture = Mixture(self.layout.windows, self._slots(), config.seed)
        self._token_arrays = [shard.tokens for shard in tokens.shards]
        self._view = OneView(self._token_arrays, config.seq_len + 1)
        self._document_starts = [shard.starts for shard in tokens.shards]
        # Indices whose places are worked out together: more where a block is spread over many shards, fewer where it
        # would hold many epochs.
        self._block_size = min(max(1 << 14, 64 * len(tokens.shards)), max(64, self.epoch_windows))
        self._blocks: dict[int, Places] = {}

    @property
    def epoch_windows(self) -> int:
        """Windows in one epoch."""
        return self.mixture.epoch_windows

    @property
    def start(self) -> Cursor:
        """The beginning of the stream."""
        return Cursor(seed=self.config.seed)

    def advance(self, cursor: Cursor, windows: int) -> Cursor:
        """The cursor after so many more windows."""
        epoch, index = divmod(self.index_of(cursor) + windows, self.epoch_windows)
        return Cursor(seed=cursor.seed, epoch=epoch, index=index)

    def index_of(self, cursor: Cursor) -> int:
        """A cursor as an index of the endless stream."""
        if cursor.seed != self.config.seed:
            raise ConfigError(
                f"the cursor was made with seed {cursor.seed}, the stream has {self.config.seed}",
                fix=f"set seed={cursor.seed} to go on, or start anew",
            )
        return cursor.epoch * self.epoch_windows + cursor.index

    def read(self, start: int, count: int) -> Windows:
        """`count` windows from an index of the endless stream on."""
        parts = []
        while count > 0:
            number, low = divmod(start, self._block_size)
            taken = min(count, self._block_size - low)
            parts.append(self._block(number).part(low, low + taken))
            start, count = start + taken, count - taken
        return self._read(parts[0] if len(parts) == 1 else Places.joined(parts))

    def read_at(self, indices: Array) -> Windows:
        """The windows at any indices of the endless stream."""
        return self._read(self._locate(np.asarray(indices, dtype=np.int64)))

    def _block(self, number: int) -> Places:
        """Where the windows of a block of indices lie: the order costs least in blocks, and neighbours ask for it."""
        block = self._blocks.get(number)
        if block is None:
            first = number * self._block_size
            block = self._locate(np.arange(first, first + self._block_size, dtype=np.int64))
            if len(self._blocks) >= 4:
                self._blocks.pop(next(iter(self._blocks)), None)
            self._blocks[number] = block
        return block

    def _locate(self, indices: Array) -> Places:
        lanes, windows = self.mixture.locate(indices)
        if not isinstance(self.layout, Stretches):
            return Places(lanes=lanes, windows=windows)
        shards, firsts, room = self.layout.spans(lanes, windows)
        places = Places(
            lanes=lanes,
            windows=windows,
            addresses=self._view.addresses(shards, firsts),
            over=np.flatnonzero(room <= self.config.seq_len).tolist(),
        )
        if self.config.packing == "joined":
            return places
        edges, boundaries = self.layout.boundaries(shards, firsts, room, self._document_starts)
        return replace(places, edges=edges, boundaries=boundaries)

    def _read(self, places: Places) -> Windows:
        if isinstance(self.layout, Stretches):
            return self._read_stretches(self.layout, places)
        return self._read_pieces(self.layout, places)

    def _read_stretches(self, layout: Stretches, places: Places) -> Windows:
        if places.over:
            rows = np.empty((len(places.windows), self.config.seq_len + 1), self._dtype)
            whole = np.delete(np.arange(len(rows)), places.over)
            rows[whole] = self._view.copy(places.addresses[whole])
            for number in places.over:
                # The few windows that run over the end of a stretch into the next one.
                parts = layout.segments(int(places.lanes[number]), int(places.windows[number]))
                rows[number] = np.concatenate([self._token_arrays[shard][at : at + size] for shard, at, size in parts])
        else:
            rows = self._view.copy(places.addresses)
        return Windows(inputs=rows[:, :-1], labels=rows[:, 1:], used=None, starts=self._starts(places, rows))

    def _starts(self, places: Places, rows: npt.NDArray[Any]) -> Array:
        length = self.config.seq_len
        row_starts = np.arange(0, len(rows) * length, length, dtype=np.int64)
        if self.config.packing == "joined":
            return row_starts
        inner = np.repeat(row_starts, np.diff(places.edges)) + places.boundaries
        over = [
            number * length + np.flatnonzero(rows[number, 1:length] == self.tokens.boundary) + 1
            for number in places.over
        ]
        starts = np.concatenate([row_starts, inner, *over])
        starts.sort()
        return starts

    def _read_pieces(self, layout: Pieces, places: Places) -> Windows:
        boundary, length = self.tokens.boundary, self.config.seq_len
        inputs = np.full((len(places.windows), length), boundary, self._dtype)
        labels = np.full((len(places.windows), length), boundary, self._dtype)
        used = np.zeros(len(places.windows), np.int64)
        starts: list[int] = []
        for row, (lane, window) in enumerate(zip(places.lanes.tolist(), places.windows.tolist(), strict=True)):
            at = 0
            for shard, first, size in layout.segments(lane, window):
                array = self._token_arrays[shard]
                inputs[row, at : at + size] = array[first : first + size]
                # What follows a document's last token is the next one's boundary token; so it is at a shard's end.
                following = array[first + 1 : first + size + 1]
                labels[row, at : at + len(following)] = following
                starts.append(row * length + at)
                at += size
            used[row] = at
            if at < length:
                starts.append(row * length + at)
        return Windows(inputs=inputs, labels=labels, used=used, starts=np.array(starts, dtype=np.int64))

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(cast(str, self.tokens.manifest["dtype"]))

    def _slots(self) -> dict[str, int]:
        windows = self.layout.windows
        if self.config.mixture is None:
            return windows
        weights = {name: weight for name, weight in self.config.mixture.items() if name in windows and weight > 0}
        return slots_by_weight(weights, self.config.epoch_windows or sum(windows.values()))

    def describe(self) -> dict[str, Any]:
        """What an epoch holds, and what is lost to cutting and padding."""
        slots = dict(zip(self.mixture.names, self.mixture.slots.tolist(), strict=True))
        total = self.epoch_windows * self.config.seq_len
        padding = 0.0
        if isinstance(self.layout, Pieces):
            padding = 1 - self.layout.used_tokens / (sum(self.layout.windows.values()) * self.config.seq_len)
        return {
            "windows": self.epoch_windows,
            "tokens": total,
            "windows_by_source": slots,
            "passes_by_source": {name: slots[name] / count for name, count in self.layout.windows.items() if count},
            "dropped_tokens": self.layout.dropped_tokens,
            "padding": padding,
        }


def open_stream(
    config: StreamConfig,
    *,
    check: Check = "index",
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
) -> TokenStream:
    """Open the shards that a config names, check them, and stand at their beginning."""
    tokens = open_tokens(config.tokens, check=check, tokenizer=tokenizer, vocab_size=vocab_size)
    return TokenStream(config, tokens)
