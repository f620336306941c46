"""The scheduler: one step lets the computed tokens of each sequence catch up with its known ones, under one budget.

There is no prefill or decode phase. A new prompt lacks all of its tokens (in chunks, if it is longer than the budget
leaves), a decoding sequence lacks one, a speculating one lacks one and its draft. A sequence that found its prefix in
the cache lacks less; a preempted one lacks everything again.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

from piledriver.serve.scheduling.blocks import BlockPool
from piledriver.serve.scheduling.sequence import Sequence


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence that run in a step."""

    sequence: Sequence
    start: int
    size: int
    draft: int
    """How many of them, at the end, are draft tokens."""
    samples: bool
    """Whether the chunk reaches the last known token, so that new tokens are sampled."""


@dataclass(frozen=True)
class Step:
    """What runs next."""

    chunks: list[Chunk]
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that left the queue for this step."""

    @property
    def tokens(self) -> int:
        return sum(chunk.size for chunk in self.chunks)


class Scheduler:
    """Chooses the chunks of each step and holds the blocks of the sequences."""

    def __init__(self, pool: BlockPool, *, token_budget: int, max_sequences: int, prefix_cache: bool = True) -> None:
        self.pool, self.token_budget, self.max_sequences = pool, token_budget, max_sequences
        self.prefix_cache = prefix_cache
        self.running: list[Sequence] = []
        """In order of priority, then arrival; the last is preempted first."""
        self.waiting: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        bisect.insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or was cancelled; its blocks are free at once."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        self._release(sequence)

    def schedule(self) -> Step:
        """Return the next step, with blocks reserved and `computed` advanced; empty if nothing can run."""
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        budget = self._schedule_running(chunks, preempted)
        admitted = [] if preempted else self._admit(chunks, budget)
        return Step(chunks, preempted, admitted)

    def preempt_all(self) -> list[Sequence]:
        """Release the blocks of all running sequences and queue them again; return them."""
        preempted = self.running[::-1]
        self.running.clear()
        for sequence in preempted:
            self._preempt(sequence)
        return preempted

    def accepted(self, sequence: Sequence, tokens: list[int]) -> None:
        """Append sampled tokens that were read from the device; cut `computed` back to what they confirm."""
        sequence.tokens += tokens
        if sequence.pending:
            sequence.pending -= 1
        if sequence.draft:
            sequence.computed = min(sequence.computed, sequence.known - 1)
            sequence.draft = []

    def _schedule_running(self, chunks: list[Chunk], preempted: list[Sequence]) -> int:
        budget, running, position = self.token_budget, self.running, 0
        size, prefix_cache = self.pool.block_size, self.prefix_cache
        while position < len(running) and budget > 0:
            sequence = running[position]
            computed, known = sequence.computed, len(sequence.tokens) + sequence.pending
            if computed == known - 1 and not sequence.draft and computed < len(sequence.blocks) * size:
                if known < sequence.limit or not sequence.pending:  # else the last token is on its way
                    # A decode step within the last block, the usual case: `_advance` in short.
                    sequence.computed = known
                    if prefix_cache and known % size == 0:
                        self._publish(sequence)
                    chunks.append(Chunk(sequence, computed, 1, 0, True))
                    budget -= 1
                position += 1
                continue
            count = min(known + len(sequence.draft) - computed, budget)
            if count < 1 or (sequence.pending and known >= sequence.limit):
                position += 1
                continue
            while not self._reserve(sequence, computed + count):
                if sequence.draft:
                    sequence.draft = []
                    count = min(sequence.known - sequence.computed, budget)
                    continue
                victim = running.pop()
                self._preempt(victim)
                preempted.append(victim)
                if victim is sequence:
                    return budget
            chunks.append(self._advance(sequence, count))
            budget -= count
            position += 1
        return budget

    def _admit(self, chunks: list[Chunk], budget: int) -> list[Sequence]:
        admitted: list[Sequence] = []
        position = 0
        while budget > 0 and position < len(self.waiting) and len(self.running) < self.max_sequences:
            sequence = self.waiting[position]
            if sequence.pending:  # preempted while its last token was being sampled
                position += 1
                continue
            self._find_prefix(sequence)
            count = min(sequence.known - sequence.computed, budget)
            if not self._reserve(sequence, sequence.computed + count):
                self._release(sequence)
                break
            del self.waiting[position]
            admitted.append(sequence)
            bisect.insort(self.running, sequence, key=_order)
            chunks.append(self._advance(sequence, count))
            budget -= count
        return admitted

    def _advance(self, sequence: Sequence, count: int) -> Chunk:
        start = sequence.computed
        sequence.computed = start + count
        draft = max(0, sequence.computed - sequence.known)
        if draft < len(sequence.draft):
            del sequence.draft[draft:]
        self._publish(sequence)
        return Chunk(sequence, start, count, draft, sequence.computed >= sequence.known)

    def _find_prefix(self, sequence: Sequence) -> None:
        sequence.root = self.pool.root(sequence.salt)
        if not (self.prefix_cache and sequence.reuse):
            return
        # The last token is always computed: its logits choose the next one.
        blocks, prefixes = self.pool.find(sequence.root, sequence.tokens, sequence.known - 1)
        self.pool.share(blocks)
        sequence.blocks, sequence.prefixes = blocks, prefixes
        sequence.computed = len(blocks) * self.pool.block_size
        if len(sequence.tokens) == sequence.prompt_length:
            sequence.cached = sequence.computed

    def _publish(self, sequence: Sequence) -> None:
        """Make blocks findable that are full of confirmed tokens once this step has run.

        Other sequences may use them in this very step: a layer writes all new keys before any query reads them.
        """
        if not self.prefix_cache:
            return
        size, done = self.pool.block_size, len(sequence.prefixes)
        full = min(sequence.computed, len(sequence.tokens)) // size
        while done < full:
            prefix = sequence.prefixes[-1] if done else sequence.root
            tokens = tuple(sequence.tokens[done * size : (done + 1) * size])
            sequence.prefixes.append(self.pool.publish(sequence.blocks[done], prefix, tokens))
            done += 1

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence blocks for this many tokens; take none if there are too few."""
        missing = -(-tokens // self.pool.block_size) - len(sequence.blocks)
        if missing > self.pool.free:
            return False
        for _ in range(missing):
            block = self.pool.take()
            assert block is not None
            sequence.blocks.append(block)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._release(sequence)
        bisect.insort(self.waiting, sequence, key=_order)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.prefixes, sequence.draft = [], [], []
        sequence.computed = 0


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
