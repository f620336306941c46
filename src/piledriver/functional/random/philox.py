"""Philox4x32-10 on torch integers: the same bits on every device, under `vmap` and inside compiled graphs.

`core.random` has the same block function in numpy; a test holds the two together. Words are 32-bit numbers in int64
tensors. No product may overflow: a compiler of C++ takes that for impossible, and its kernels had other bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from piledriver.core.random import philox4x32 as numpy_philox4x32
from piledriver.functional.torch_private import has_dispatch_mode

Word = int | Tensor

_MASK = 0xFFFFFFFF
# The multipliers less 2**32: the low words of the products are the same, the high ones too after adding the factor.
_M0, _M1 = 0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def tensor_philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Return four random words from four 32-bit counter words and two key words, as ints or tensors.

    >>> [hex(word) for word in tensor_philox4x32((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (((product1 >> 32) + c2) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            (((product0 >> 32) + c0) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def low(value: Word) -> Word:
    """Return the low 32 bits of a 64-bit pattern."""
    return value & _MASK


def high(value: Word) -> Word:
    """Return the high 32 bits of a 64-bit pattern (an arithmetic shift, so the sign has to be masked away)."""
    return (value >> 32) & _MASK


def joined(low_word: Word, high_word: Word) -> Word:
    """Return the 64-bit pattern of two words; Python ints come back signed, as an int64 tensor would hold them."""
    value = low_word | (high_word << 32)
    if isinstance(value, int) and value >= 1 << 63:
        return value - (1 << 64)
    return value


def random_words(key: Word, lane: int, start: int, stop: int, device: torch.device | str) -> Tensor:
    """Return the words number `start` (a multiple of 4) to `stop`, rounded up to whole blocks, in int64.

    Number i is word i % 4 of the block with counter (i // 4, lane), for every range.
    """
    if isinstance(key, int) and _is_plain_cpu(device):
        return _words_by_numpy(key, lane, start // 4, (stop + 3) // 4)
    blocks = torch.arange(start // 4, (stop + 3) // 4, dtype=torch.int64, device=device)
    words = tensor_philox4x32((low(blocks), high(blocks), low(lane), high(lane)), (low(key), high(key)))
    return torch.stack([torch.as_tensor(word) for word in words], dim=-1).reshape(-1)


def _is_plain_cpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cpu" and not torch.compiler.is_compiling() and not has_dispatch_mode()


def _words_by_numpy(key: int, lane: int, first: int, last: int) -> Tensor:
    """Return the same words by `core.random`: numpy's small operations cost less than torch's."""
    blocks = np.arange(first, last, dtype=np.uint64)
    lanes = (np.array([low(lane)], np.uint64), np.array([high(lane)], np.uint64))
    mask, shift = np.uint64(_MASK), np.uint64(32)
    words = numpy_philox4x32((blocks & mask, blocks >> shift, *lanes), (int(low(key)), int(high(key))))
    return torch.from_numpy(np.stack(words, axis=-1).reshape(-1).view(np.int64))
