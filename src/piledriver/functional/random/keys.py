"""Keys: splittable, counter-based randomness without state.

A key is 64 bits. Everything drawn from it is a pure function of those bits and of the element's index, on integer
arithmetic alone, so that every process, device and transform sees the same numbers. Never draw twice from one key:
`split` it or `fold_in` a name or a step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.functional.random.philox import Word, high, joined, low, random_words, tensor_philox4x32
from piledriver.functional.torch_private import has_dispatch_mode, is_functorch_wrapped_tensor

# Draws above this many numbers are made piece by piece. On a CPU a piece's integer temporaries fit in a cache;
# elsewhere it is only a bound on their memory.
_CPU_PIECE, _PIECE = 1 << 16, 1 << 24
_GRID_BITS = {torch.bfloat16: 8, torch.float16: 11}
_SPLIT, _FOLD = 0x5DEECE66D0000001, 0x2545F4914F6CDD1D


class Key:
    """64 bits in an int64 tensor (zero-dimensional, or with leading dimensions for a batch of keys), and a lane.

    The lane is a number known in advance, the hash of the names folded in. It goes into the counter, not through the
    block function, so that a name costs nothing: in a compiled graph a dropout is one block function, not two.

    >>> first, second = split(key(0))
    >>> uniform(first, (2,)).equal(uniform(first, (2,))), uniform(first, (2,)).equal(uniform(second, (2,)))
    (True, False)
    """

    # As text, which a compiler takes for a constant: a number of 64 bits it would make a variable of 63.
    __slots__ = ("_lane", "bits")
    bits: Tensor
    _lane: str

    def __init__(self, bits: Tensor, lane: int = 0) -> None:
        self.bits = bits
        self._lane = str(lane)

    @property
    def lane(self) -> int:
        """The hash of the names folded in since the last split."""
        return int(self._lane)

    @property
    def shape(self) -> torch.Size:
        """The batch shape; empty for one key."""
        return self.bits.shape

    def __len__(self) -> int:
        return len(self.bits)

    def __getitem__(self, index: int) -> Key:
        return Key(self.bits[index], self.lane)

    def __iter__(self) -> Iterator[Key]:
        return (Key(bits, self.lane) for bits in self.bits)

    def to(self, device: torch.device | str) -> Key:
        """Return the key on another device. Keep keys on the CPU: draws on a GPU then need no synchronisation."""
        return Key(self.bits.to(device), self.lane)

    def __repr__(self) -> str:
        return f"Key({self.bits!r}, lane={self.lane:#x})"


pytree.register_pytree_node(
    Key,
    lambda key: ([key.bits], key.lane),
    lambda values, lane: Key(next(iter(values)), lane),
    serialized_type_name="piledriver.functional.Key",
    flatten_with_keys_fn=lambda key: ([(pytree.GetAttrKey("bits"), key.bits)], key.lane),
)


def key(seed: int) -> Key:
    """Return the key of a seed (any 64-bit number, such as `core.random.Stream(...).key`)."""
    try:
        seed = operator.index(seed)
    except TypeError:
        raise UsageError(
            f"the seed {seed!r} is not a whole number", fix="`key(0)`; names go in with `fold_in`"
        ) from None
    if not -(1 << 63) <= seed < 1 << 64:
        raise UsageError(f"the seed {seed} does not fit in 64 bits", fix="use a number below 2**64")
    return Key(torch.tensor(seed - (1 << 64) if seed >= 1 << 63 else seed, dtype=torch.int64))


def split(key: Key, count: int = 2) -> Key:
    """Return `count` independent keys as one `Key` with a leading dimension: index it, unpack it, or map over it."""
    _single(key, "split")
    if not isinstance(count, int) or count < 0:
        raise UsageError(f"cannot split a key into {count!r}", fix="give a number of keys; split again for two dims")
    return _derived(key, torch.arange(count, dtype=torch.int64, device=key.bits.device), _SPLIT)


def fold_in(key: Key, data: int | str | Tensor) -> Key:
    """Derive a key for a name, a number or a step; the step may be a tensor inside a compiled graph."""
    if isinstance(data, str):
        return Key(key.bits, _lane(key.lane, _name_hash(data)))
    _single(key, "fold_in")
    if isinstance(data, Tensor):
        return _derived(key, data.to(torch.int64), _FOLD)
    try:
        return _derived(key, operator.index(data), _FOLD)
    except TypeError:
        raise UsageError(f"cannot fold {data!r} into a key", fix="use a whole number, a name or a tensor") from None


def bits(key: Key, shape: Sequence[int], *, device: torch.device | str | None = None) -> Tensor:
    """Draw 32-bit words, as int64 numbers from 0 to 2**32 - 1."""
    return _drawn(key, shape, torch.int64, device, lambda words: words)


def uniform(
    key: Key,
    shape: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    minimum: float = 0.0,
    maximum: float = 1.0,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw from [minimum, maximum) on a grid of 2**-24 of the range: exact in fp32, so equal on every device.

    16-bit numbers get the grid that they can hold (2**-8, 2**-11): none is rounded up to the maximum of (0, 1).
    """
    width, kept = maximum - minimum, _GRID_BITS.get(dtype, 24)
    return _drawn(
        key, shape, dtype, device, lambda words: ((words >> (32 - kept)).double() * (2.0**-kept * width)) + minimum
    )


def normal(
    key: Key, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32, *, device: torch.device | str | None = None
) -> Tensor:
    """Draw standard normal numbers (Box-Muller), in fp64 and then rounded: devices differ by one last bit at most."""
    return _drawn(key, shape, dtype, device, _box_muller)


def _box_muller(words: Tensor) -> Tensor:
    pairs = words.double().reshape(-1, 2)
    radius = torch.sqrt(-2.0 * torch.log((pairs[:, 0] + 1.0) * 2.0**-32))
    angle = pairs[:, 1] * (2.0 * math.pi * 2.0**-32)
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1).reshape(-1)


def truncated_normal(
    key: Key,
    shape: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    bound: float = 2.0,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw standard normal numbers within +-bound by the inverse error function, in fp64 and then rounded."""
    edge = math.erf(bound / math.sqrt(2.0))

    def finish(words: Tensor) -> Tensor:
        unit = (words.double() + 0.5) * 2.0**-32
        return (torch.erfinv((2.0 * unit - 1.0) * edge) * math.sqrt(2.0)).clamp(-bound, bound)

    return _drawn(key, shape, dtype, device, finish)


def bernoulli(
    key: Key, probability: float, shape: Sequence[int] = (), *, device: torch.device | str | None = None
) -> Tensor:
    """Draw True with the given probability, to 2**-32."""
    if not 0.0 <= probability <= 1.0:
        raise UsageError(f"{probability} is not a probability", fix="give a number from 0 to 1")
    threshold = round(float(probability) * 2**32)
    return _drawn(key, shape, torch.bool, device, lambda words: words < threshold)


def categorical(key: Key, logits: Tensor, dim: int = -1, *, shape: Sequence[int] | None = None) -> Tensor:
    """Draw indices with the probabilities softmax(logits) along a dimension, by the Gumbel-max trick.

    `shape` is that of the result; the shape of the logits without `dim` must broadcast to it.
    """
    logits = logits.movedim(dim, -1)
    batch = tuple(logits.shape[:-1]) if shape is None else tuple(shape)

    def gumbel(words: Tensor) -> Tensor:
        return -torch.log(-torch.log((words.double() + 0.5) * 2.0**-32))

    noise = _drawn(key, (*batch, logits.shape[-1]), torch.float32, logits.device, gumbel)
    return (logits.float() + noise).argmax(dim=-1)


def randint(
    key: Key, shape: Sequence[int], minimum: int, maximum: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Draw integers in [minimum, maximum), for ranges below 2**31; the bias is below 2**-32 times the range."""
    span = maximum - minimum
    if not 0 < span < 1 << 31:
        raise UsageError(f"the range [{minimum}, {maximum}) is empty or too wide", fix="keep it below 2**31 numbers")
    return ((bits(key, shape, device=device) * span) >> 32) + minimum


def permutation(key: Key, length: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the numbers 0 to length - 1 in random order."""
    words = bits(key, (2, length), device=device)
    # Two words a number, so that no two are equal for any length that fits in memory; the sort is stable anyway.
    return torch.argsort(((words[0] << 31) | (words[1] >> 1)), stable=True)


def _single(key: Key, what: str) -> None:
    if not isinstance(key, Key):
        raise UsageError(f"{what} got a {type(key).__name__} where its key belongs", fix="make one: `key(0)`")
    if key.bits.ndim:
        raise UsageError(
            f"{what} got a batch of keys of shape {tuple(key.shape)}",
            fix="take one (`keys[0]`) or use `vmap` over them",
        )


def _word(key: Key) -> Word:
    """Return the key's bits as a Python int if their value is known, which makes small draws cheaper."""
    known = key.bits
    if (
        torch.compiler.is_compiling()
        or type(known) is not Tensor
        or known.device.type != "cpu"
        or is_functorch_wrapped_tensor(known)
        or has_dispatch_mode()
    ):
        return known
    return int(known)


def _derived(key: Key, data: Word, kind: int) -> Key:
    # The kind keeps splits and numbers apart: split(key)[3] is not fold_in(key, 3), and neither is a draw.
    lane, word = _lane(key.lane, kind), _word(key)
    a, b, _, _ = tensor_philox4x32((low(data), high(data), low(lane), high(lane)), (low(word), high(word)))
    made = joined(a, b)
    if not isinstance(made, Tensor):
        made = torch.tensor(made, dtype=torch.int64, device=key.bits.device)
    return Key(made)


def _lane(lane: int, data: int) -> int:
    return ((lane ^ data) * 0x9E3779B97F4A7C15 + 0x165667B19E3779F9) & 0xFFFFFFFFFFFFFFFF


def _name_hash(name: str) -> int:
    if torch.compiler.is_compiling():
        return _hash_of(name)
    known = _HASHES.get(name)
    if known is None:
        known = _HASHES[name] = _hash_of(name)
    return known


# Only a cache: the paths of the modules in use, a few hundred short strings.
_HASHES: dict[str, int] = {}


def _hash_of(name: str) -> int:
    """Return the 64-bit FNV-1a hash: integer arithmetic that a compiler can trace; Philox does the mixing."""
    value = 0xCBF29CE484222325
    for letter in name:
        value = ((value ^ ord(letter)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def _drawn(
    key: Key,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str | None,
    finish: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return random words through `finish`; large draws in pieces, because the integers take eight bytes each."""
    _single(key, "a draw")
    if isinstance(shape, int) or any(size < 0 for size in shape):
        raise UsageError(f"a draw got the shape {shape!r}", fix="give a tuple of sizes, such as (3,)")
    shape, word, count = tuple(shape), _word(key), math.prod(shape)
    where = torch.device(device) if device is not None else key.bits.device
    piece = _CPU_PIECE if where.type == "cpu" else _PIECE
    if not isinstance(word, int) or count <= piece:
        return finish(random_words(word, key.lane, 0, count, where))[:count].to(dtype).reshape(shape)
    out = torch.empty(count, dtype=dtype, device=where)
    for start in range(0, count, piece):
        stop = min(start + piece, count)
        out[start:stop] = finish(random_words(word, key.lane, start, stop, where))[: stop - start]
    return out.reshape(shape)
