"""The arrays of a step: flattened tokens and positions, block tables, and the rows that are sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from piledriver.serve.scheduling.scheduler import Chunk, Step
from piledriver.serve.scheduling.sequence import Sequence

IntArray = npt.NDArray[np.int32]


class BlockTables:
    """The block table of each running sequence, in a row (slot) of its own; the last row is padding's."""

    def __init__(self, slots: int, width: int, scratch_block: int) -> None:
        self.array: IntArray = np.full((slots + 1, width), scratch_block, dtype=np.int32)
        self.padding_slot = slots
        self._free = list(range(slots - 1, -1, -1))
        self._written: dict[int, list[int]] = {}

    def update(self, sequence: Sequence) -> bool:
        """Write the blocks that a sequence got since the last step; return whether the table changed."""
        if sequence.slot < 0:
            sequence.slot = self._free.pop()
            self._written[sequence.slot] = []
        written, blocks = self._written[sequence.slot], sequence.blocks
        if len(written) == len(blocks):  # a running sequence's blocks are only added to
            return False
        self.array[sequence.slot, len(written) : len(blocks)] = blocks[len(written) :]
        written += blocks[len(written) :]
        return True

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that ended or was preempted."""
        if sequence.slot >= 0:
            self._free.append(sequence.slot)
            del self._written[sequence.slot]
            sequence.slot = -1


class SampleRow(NamedTuple):
    """One row of logits from which a token is drawn."""

    sequence: Sequence
    place: int
    """Which token of the answer it is, from 0."""
    draft: tuple[int, ...] = ()
    """Draft tokens before it, which it depends on."""


@dataclass(frozen=True)
class StepInputs:
    """A step as arrays; `rows` says which of the flattened tokens are sampled from, in their order."""

    tokens: IntArray
    from_slot: IntArray
    """The slot whose last sampled token, still on the device, is the token; -1 where `tokens` has it."""
    positions: IntArray
    slots: IntArray
    """[chunks]: row of the block tables."""
    starts: IntArray
    contexts: IntArray
    rows: IntArray
    samples: list[SampleRow]
    spans: tuple[tuple[int, int], ...]


def step_inputs(step: Step) -> StepInputs:
    """Return the arrays of a step whose sequences have slots."""
    chunks = step.chunks
    counts = np.array([chunk.size for chunk in chunks], dtype=np.int32)
    begins = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    total = int(starts[-1])
    if total == len(chunks):
        positions = begins
    else:
        positions = np.arange(total, dtype=np.int32) - np.repeat(starts[:-1] - begins, counts)
    tokens: list[int] = []
    from_slot = np.full(total, -1, dtype=np.int32)
    rows: list[int] = []
    samples: list[SampleRow] = []
    for chunk, start in zip(chunks, starts[:-1].tolist(), strict=True):
        sequence = chunk.sequence
        if chunk.size == 1 and chunk.samples and not chunk.draft:  # a decode step
            known = sequence.tokens
            if sequence.pending:
                from_slot[start] = sequence.slot
                tokens.append(0)
            else:
                tokens.append(known[-1])
            rows.append(start)
            samples.append(SampleRow(sequence, len(known) + sequence.pending - sequence.prompt_length))
            continue
        _chunk_tokens(chunk, tokens, from_slot)
        if not chunk.samples:
            continue
        last = start + chunk.size - 1
        first_index = sequence.known - sequence.prompt_length
        for ahead in range(chunk.draft + 1):
            rows.append(last - chunk.draft + ahead)
            samples.append(SampleRow(sequence, first_index + ahead, tuple(sequence.draft[:ahead])))
    return StepInputs(
        np.array(tokens, dtype=np.int32),
        from_slot,
        positions,
        np.array([chunk.sequence.slot for chunk in chunks], dtype=np.int32),
        starts,
        begins + counts,
        np.array(rows, dtype=np.int32),
        samples,
        tuple(zip(counts.tolist(), (begins + counts).tolist(), strict=True)),
    )


def _chunk_tokens(chunk: Chunk, tokens: list[int], from_slot: Any) -> None:
    sequence, end = chunk.sequence, chunk.start + chunk.size
    known = len(sequence.tokens)
    tokens.extend(sequence.tokens[chunk.start : min(end, known)])
    if end > known:
        if sequence.pending:
            from_slot[len(tokens)] = sequence.slot
            tokens.append(0)
        tokens.extend(sequence.draft[: chunk.draft])
