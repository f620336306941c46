"""The scheduler: computed catches up with known, within the budget, whatever is preempted or guessed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from piledriver.core.random import Stream
from piledriver.serve.scheduling.blocks import BlockPool
from piledriver.serve.scheduling.scheduler import Scheduler
from piledriver.serve.scheduling.sequence import Sequence


@given(
    seed=st.integers(0, 2**32),
    budget=st.integers(1, 20),
    blocks=st.integers(6, 20),
    size=st.sampled_from([1, 2, 4]),
    most=st.integers(1, 5),
)
def test_every_sequence_is_finished_in_order_of_its_tokens(
    seed: int, budget: int, blocks: int, size: int, most: int
) -> None:
    stream, number = Stream(seed, "scheduler"), iter(range(10**6))

    def below(bound: int) -> int:
        return stream.below(bound, next(number))

    pool = BlockPool(blocks, size)
    scheduler = Scheduler(pool, token_budget=budget, max_sequences=most)
    longest = min(blocks * size, 12)
    ends: dict[int, int] = {}
    for at in range(6):
        length = 1 + below(longest - 1)
        tokens = [below(3) for _ in range(length)]
        ends[at] = length + 1 + below(longest - length)
        scheduler.add(Sequence(at, tokens, length, ends[at], priority=below(2)))
    for _ in range(2000):
        if not (scheduler.running or scheduler.waiting):
            break
        for sequence in scheduler.running:
            if sequence.computed == sequence.known - 1 and below(3) == 0:
                sequence.draft = [below(3) for _ in range(min(2, sequence.limit - sequence.known - 1))]
        step = scheduler.schedule()
        assert 0 < step.tokens <= budget
        assert len(scheduler.running) <= most
        for chunk in step.chunks:
            sequence = chunk.sequence
            assert chunk.start + chunk.size == sequence.computed <= len(sequence.blocks) * size
            assert chunk.samples == (sequence.computed >= sequence.known)
            if chunk.samples:
                right = below(chunk.draft + 1)
                scheduler.accepted(sequence, [*sequence.draft[:right], below(3)])
                assert sequence.computed == sequence.known - 1
                if len(sequence.tokens) >= ends[sequence.number]:
                    scheduler.remove(sequence)
    assert not scheduler.running
    assert not scheduler.waiting
    assert pool.free == blocks
