"""A state taken apart into JSON and tensors comes back as it was; what cannot is refused."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piledriver.checkpoint.errors import UnsupportedStateError
from piledriver.checkpoint.state_tree import (
    encode_value,
    inline_tensor,
    merge_state_trees,
    rebuild_state,
    split_state,
    tensor_from_inline,
    tensor_keys,
)

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.datetimes()
    | st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([1, 2]), range(3), Path("a/b")])
    | st.floats(width=32).map(np.float32)
    | st.integers(-5, 5).map(np.int64)
)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b) and not (isinstance(a, Path) and isinstance(b, Path)):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float | np.floating) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


@given(states)
def test_a_state_comes_back_as_it_was(state: Any) -> None:
    tree, tensors = split_state(state, "x")
    assert tensors == {}
    assert same(rebuild_state(json.loads(json.dumps(tree, allow_nan=False)), tensor_from_inline), state)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_inside_the_json(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    back = tensor_from_inline(json.loads(json.dumps(inline_tensor(tensor))))
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))


def test_arrays_and_counts() -> None:
    state = {"a": np.arange(6, dtype=np.uint32).reshape(2, 3), "c": Counter("aab")}
    back = rebuild_state(json.loads(json.dumps(split_state(state, "x")[0])), tensor_from_inline)
    assert np.array_equal(back["a"], state["a"])
    assert back["a"].dtype == np.uint32
    assert back["c"] == Counter("aab")


def test_a_tensor_that_appears_twice_is_kept_once() -> None:
    weight = torch.ones(2)
    tree, tensors = split_state({"a": weight, "b": [weight], "c/d": torch.ones(1), "c": {"d": torch.ones(1)}}, "m")
    assert tensor_keys(tree) == ["m/a", "m/a", "m/c/d", "m/c/d~"]
    assert set(tensors) == {"m/a", "m/c/d", "m/c/d~"}


@pytest.mark.parametrize("value", [object(), len, datetime.timedelta(1), type, np.array(["a"], dtype=object)])
def test_what_would_need_pickle_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match="scheduler/extra/0 holds a"):
        encode_value({"extra": [value]}, "scheduler", lambda *_: None)


def test_ranks_with_other_layers_make_one_tree() -> None:
    first = {"state": {"a": 1}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}
    second = {"state": {"b": 2}, "param_groups": [{"lr": 0.1, "params": ["b"]}]}
    assert merge_state_trees(first, second) == {
        "state": {"a": 1, "b": 2},
        "param_groups": [{"lr": 0.1, "params": ["a", "b"]}],
    }
