"""The block pool of a paged KV cache: reference counts, and reuse of blocks with equal content.

A block holds the keys and values of `block_size` consecutive tokens. A full block can be shared by every sequence
that starts with the same tokens. Its key is exact: the number of its prefix (given out once, never reused) and its own
tokens, so that no collision of hashes can mix two prompts (Kwon et al., PagedAttention, 2023).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

Root = tuple[int, str]
"""The empty prefix of a salt: (how often the cache was cleared, salt)."""
Key = tuple[int | Root, tuple[int, ...]]


class BlockPool:
    """Blocks 0 to count - 1, each free, used by some sequences, or unused but still holding a known prefix.

    >>> pool = BlockPool(4, 2)
    >>> root = pool.root()
    >>> first = pool.take()
    >>> prefix = pool.publish(first, root, (7, 8))
    >>> pool.release([first])
    >>> pool.find(root, [7, 8, 9])
    ([0], [0])
    """

    def __init__(self, count: int, block_size: int) -> None:
        self.count, self.block_size = count, block_size
        self.users = [0] * count
        """How many sequences use each block."""
        self._blank = deque(range(count))
        self._idle: OrderedDict[int, None] = OrderedDict()  # unused, content known; the first is evicted first
        self._known: dict[Key, tuple[int, int]] = {}  # key -> (block, number of the prefix that ends with it)
        self._keys: dict[int, Key] = {}
        self._next_prefix = self._clears = 0

    @property
    def free(self) -> int:
        """Number of blocks that `take` can return."""
        return len(self._blank) + len(self._idle)

    def root(self, salt: str = "") -> Root:
        """Return the empty prefix; sequences of different salts never share a block."""
        return self._clears, salt

    def take(self) -> int | None:
        """Return a block for one sequence to write to, or None if all are used. May forget the oldest idle prefix."""
        if self._blank:
            block = self._blank.popleft()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        else:
            return None
        self.users[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one use of each block. Later blocks are evicted first: a prefix is useless without its beginning."""
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._blank.append(block)

    def find(self, root: Root, tokens: Sequence[int], limit: int | None = None) -> tuple[list[int], list[int]]:
        """Return the blocks of the longest known prefix of at most `limit` tokens, and the numbers of its prefixes.

        The blocks are not taken; see `share`.
        """
        size, blocks, prefixes = self.block_size, [], []
        prefix: int | Root = root
        end = len(tokens) if limit is None else min(limit, len(tokens))
        for start in range(0, end - size + 1, size):
            found = self._known.get((prefix, tuple(tokens[start : start + size])))
            if found is None:
                break
            block, prefix = found
            blocks.append(block)
            prefixes.append(prefix)
        return blocks, prefixes

    def share(self, blocks: Iterable[int]) -> None:
        """Add one use of each block that `find` returned."""
        for block in blocks:
            if self.users[block] == 0:
                del self._idle[block]
            self.users[block] += 1

    def publish(self, block: int, prefix: int | Root, tokens: tuple[int, ...]) -> int:
        """Make a full block findable after `prefix`; return the number of the prefix that ends with it.

        If another block already has this content, that one stays the findable one.
        """
        key = (prefix, tokens)
        found = self._known.get(key)
        if found is None:
            found = block, self._next_prefix
            self._next_prefix += 1
            self._known[key] = found
            self._keys[block] = key
        return found[1]

    def clear_cache(self) -> None:
        """Forget the content of all blocks: after the weights have changed, or a step failed."""
        for block in list(self._keys):
            self._forget(block)
        self._blank.extend(self._idle)
        self._idle.clear()
        self._clears += 1  # sequences that began before publish after a prefix that no other finds

    def _forget(self, block: int) -> None:
        del self._known[self._keys.pop(block)]
