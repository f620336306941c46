"""Random numbers are a pure function of key, lane and index, the same by every way of asking."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import piledriver.functional as F
from piledriver.core.errors import UsageError
from piledriver.core.random import Stream
from piledriver.core.random import philox4x32 as numpy_philox
from piledriver.functional.random import keys
from piledriver.functional.random.philox import random_words, tensor_philox4x32

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")

word = st.integers(0, 2**32 - 1)
seeds = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert tensor_philox4x32(counter, key) == expected  # type: ignore[arg-type]
    on_tensors = tensor_philox4x32(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor(k) for k in key))  # type: ignore[arg-type]
    assert [int(one) for one in on_tensors] == list(expected)


@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_torch_equals_numpy(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    ours = tensor_philox4x32(tuple(torch.tensor([c]) for c in counter), key)  # type: ignore[arg-type]
    theirs = numpy_philox(tuple(np.array([c], np.uint64) for c in counter), key)  # type: ignore[arg-type]
    assert [int(a) for a in ours] == [int(b[0]) for b in theirs]


@given(seeds, st.integers(0, 2**40))
@settings(max_examples=20)
def test_bits_are_those_of_the_core_stream(seed: int, index: int) -> None:
    stream = Stream(seed % 1000, "shuffle")
    words = random_words(stream.key, 0, index * 4, index * 4 + 4, "cpu")
    assert (int(words[0]) | int(words[1]) << 32) == int(stream.bits(index)[0])
    assert F.bits(F.key(stream.key), (2,))[0] == int(stream.bits(0)[0]) & 0xFFFFFFFF


@given(seeds)
@settings(max_examples=30)
def test_every_way_to_a_number_is_the_same(seed: int) -> None:
    key = F.fold_in(F.key(seed), "dropout")
    known, batched = F.fold_in(key, 5), F.vmap(lambda one: F.uniform(one, (7,)))
    traced = F.Key(key.bits[None], key.lane)
    by_tensor = F.vmap(lambda one: F.fold_in(one, torch.tensor(5)).bits)(traced)
    assert int(by_tensor[0]) == int(known.bits)
    several = F.split(key, 3)
    assert batched(several).equal(torch.stack([F.uniform(one, (7,)) for one in several]))


def test_large_draws_are_made_in_pieces_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    key = F.fold_in(F.key(3), "x")
    for draw in (F.bits, F.uniform, F.normal, F.truncated_normal):
        whole = draw(key, (70, 3))
        with monkeypatch.context() as patch:
            patch.setattr(keys, "_CPU_PIECE", 64)
            assert draw(key, (70, 3)).equal(whole)
    assert F.uniform(key, (10,)).equal(F.uniform(key, (5, 40)).flatten()[:10])


def test_derived_keys_are_all_different() -> None:
    root = F.key(0)
    derived = [root, *F.split(root, 50), *(F.fold_in(root, i) for i in range(50))]
    derived += [F.fold_in(root, name) for name in ("a", "b", "ab", "ba")]
    derived += [F.fold_in(F.fold_in(root, "a"), "b"), F.fold_in(F.fold_in(root, "b"), "a")]
    assert len({tuple(F.bits(one, (4,)).tolist()) for one in derived}) == len(derived)


def test_distributions() -> None:
    key, count = F.key(11), 200_000
    uniform = F.uniform(key, (count,))
    assert 0.0 <= float(uniform.min()) <= float(uniform.max()) < 1.0
    assert abs(float(uniform.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / count)
    normal = F.normal(key, (count,), torch.float64)
    assert abs(float(normal.mean())) < 4 / math.sqrt(count)
    assert abs(float(normal.var()) - 1) < 4 * math.sqrt(2 / count)
    assert abs(float((normal**4).mean()) - 3) < 4 * math.sqrt(96 / count)
    cut = F.truncated_normal(key, (count,))
    assert float(cut.abs().max()) <= 2.0
    assert abs(float(cut.std()) - 0.8796) < 0.01
    assert abs(float(F.bernoulli(key, 0.3, (count,)).float().mean()) - 0.3) < 4 * math.sqrt(0.21 / count)
    assert F.randint(key, (count,), -2, 3).unique().tolist() == [-2, -1, 0, 1, 2]
    assert F.permutation(key, 1000).sort().values.equal(torch.arange(1000))


def test_compiled_draws_equal_eager_ones() -> None:
    def draw(key: F.Key, step: torch.Tensor) -> torch.Tensor:
        return F.uniform(F.fold_in(F.fold_in(key, "dropout"), step), (9,))

    compiled = F.jit(draw, backend="aot_eager")
    for step in range(3):
        assert compiled(F.key(step), torch.tensor(step)).equal(draw(F.key(step), torch.tensor(step)))


def test_a_batch_of_keys_is_refused_where_one_belongs() -> None:
    with pytest.raises(UsageError, match=r"batch of keys.*vmap"):
        F.uniform(F.split(F.key(0)), (2,))
    with pytest.raises(UsageError, match="64 bits"):
        F.key(2**64)


def test_kernels_of_one_block_have_the_same_bits() -> None:
    # Products that overflowed were other numbers in C++, for some names and where one block of four was enough.
    def draw(key: F.Key) -> list[torch.Tensor]:
        return [F.bits(F.fold_in(key, name), (4,)) for name in "abcd"]

    for ours, kernels in zip(draw(F.key(0)), F.jit(draw)(F.key(0)), strict=True):
        assert ours.equal(kernels)


def test_categorical_draws_by_softmax_along_a_dimension() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.7])
    drawn = F.categorical(F.key(0), probabilities.log(), shape=(20000,))
    torch.testing.assert_close(drawn.bincount() / 20000, probabilities, atol=0.015, rtol=0.0)
    logits = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0], [-torch.inf, -torch.inf]])
    assert F.categorical(F.key(1), logits, dim=0).tolist() == [0, 1]
    assert F.categorical(F.key(1), torch.zeros(4, 5, 9)).shape == (4, 5)
    assert F.vmap(lambda k: F.categorical(k, torch.zeros(50)))(F.split(F.key(2), 64)).unique().numel() > 20


def test_names_folded_in_outside_are_constants_of_the_graph() -> None:
    sizes: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        sizes.append(sum(not isinstance(one, torch.Tensor) for one in inputs))
        return graph.forward

    compiled = torch.compile(lambda key: F.uniform(key, (3,)), backend=backend, fullgraph=True)
    for name in ("a", "b", "c"):
        key = F.fold_in(F.key(0), name)
        assert compiled(key).equal(F.uniform(key, (3,)))
    assert sizes == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_uniforms_stay_below_one(dtype: torch.dtype) -> None:
    drawn = F.uniform(F.key(0), (20_000,), dtype)
    assert float(drawn.max()) < 1.0
    assert abs(float(drawn.float().mean()) - 0.5) < 0.01


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: F.key(1.5), r"1\.5 is not a whole number"),
        (lambda: F.key("seed"), "'seed' is not a whole number"),
        (lambda: F.fold_in(F.key(0), 1.5), r"cannot fold 1\.5"),
        (lambda: F.split(F.key(0), (2, 3)), r"into \(2, 3\)"),
        (lambda: F.uniform(0, (2,)), r"a int where its key belongs.*key\(0\)"),
        (lambda: F.uniform(F.key(0), 3), "the shape 3"),
        (lambda: F.uniform(F.key(0), (-1,)), r"the shape \(-1,\)"),
        (lambda: F.bernoulli(F.key(0), 1.5), r"1\.5 is not a probability"),
    ],
)
def test_what_is_no_key_seed_or_shape_is_named(call: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call()


def test_numbers_of_numpy_are_numbers() -> None:
    assert F.fold_in(F.key(np.int64(3)), np.int64(7)).bits.equal(F.fold_in(F.key(3), 7).bits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_gives_the_same_numbers() -> None:
    key = F.key(5)
    assert F.bits(key, (1000,), device="cuda").cpu().equal(F.bits(key, (1000,)))
    assert F.uniform(key, (1000,), device="cuda").cpu().equal(F.uniform(key, (1000,)))
    torch.testing.assert_close(
        F.normal(key, (1000,), device="cuda").cpu(), F.normal(key, (1000,)), rtol=2e-7, atol=1e-9
    )
