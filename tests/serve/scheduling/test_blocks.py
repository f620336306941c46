"""The block pool: over random operations no block is lost or shared wrongly, and equal prefixes are shared."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.core.random import Stream
from piledriver.serve.scheduling.blocks import BlockPool

SIZE = 2


class Model:
    """Sequences over a pool, with what each block holds written down beside it."""

    def __init__(self, count: int) -> None:
        self.pool = BlockPool(count, SIZE)
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}  # block -> salt and all tokens up to its end
        self.running: list[tuple[str, list[int], list[int], list[int]]] = []

    def begin(self, salt: str, tokens: list[int]) -> None:
        if len(tokens) < SIZE:
            return
        root = self.pool.root(salt)
        blocks, prefixes = self.pool.find(root, tokens)
        for at, block in enumerate(blocks):  # what is found is exactly this prefix of this salt
            assert self.content[block] == (salt, tuple(tokens[: (at + 1) * SIZE]))
        if len(tokens) // SIZE - len(blocks) > self.pool.free - sum(self.pool.users[block] == 0 for block in blocks):
            return
        self.pool.share(blocks)
        for at in range(len(blocks), len(tokens) // SIZE):
            block = self.pool.take()
            assert block is not None
            assert all(block not in other for _, _, other, _ in self.running)
            self.content[block] = salt, tuple(tokens[: (at + 1) * SIZE])
            prefix = prefixes[-1] if prefixes else root
            prefixes.append(self.pool.publish(block, prefix, tuple(tokens[at * SIZE : (at + 1) * SIZE])))
            blocks.append(block)
        self.running.append((salt, tokens, blocks, prefixes))

    def end(self, at: int) -> None:
        _, _, blocks, _ = self.running.pop(at % len(self.running))
        self.pool.release(blocks)

    def check(self) -> None:
        uses = [0] * self.pool.count
        for _, _, blocks, _ in self.running:
            for block in blocks:
                uses[block] += 1
        assert uses == self.pool.users
        assert self.pool.free == uses.count(0)


def drive(stream: Stream, operations: int, count: int) -> None:
    model, numbers = Model(count), iter(stream.bits(np.arange(14 * operations)).tolist())
    for at in range(operations):
        choice, length, salt, place = (next(numbers) for _ in range(4))
        if choice % 5 < 3:
            tokens = [next(numbers) >> 9 & 1 for _ in range(length % 9)]
            model.begin(("", "salt")[salt % 2], tokens)
        elif model.running:
            model.end(place)
        if at % 997 == 0:
            model.pool.clear_cache()
        if at % 16 == 0:
            model.check()
    while model.running:
        model.end(0)
    model.check()
    assert model.pool.free == count
    assert sorted(iter(model.pool.take, None)) == list(range(count))  # type: ignore[type-var]


@given(seed=st.integers(0, 2**32), count=st.integers(1, 12))
@settings(max_examples=30)
def test_no_block_is_lost_or_shared_wrongly(seed: int, count: int) -> None:
    drive(Stream(seed, "pool"), 100, count)


def test_a_hundred_thousand_operations() -> None:
    drive(Stream(0, "pool"), 100_000, 10)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3, 1)
    root = pool.root()
    blocks, prefix = [], root
    for token in (5, 6, 7):
        block = pool.take()
        assert block is not None
        prefix = pool.publish(block, prefix, (token,))
        blocks.append(block)
    pool.release(blocks)
    assert pool.take() == blocks[2]
    assert pool.find(root, [5, 6, 7])[0] == blocks[:2]


def test_forgotten_content_is_not_found() -> None:
    pool = BlockPool(2, 1)
    block = pool.take()
    assert block is not None
    pool.publish(block, pool.root(), (5,))
    pool.clear_cache()
    assert pool.find(pool.root(), [5]) == ([], [])
    pool.release([block])
    assert pool.free == 2
