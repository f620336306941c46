"""The restricted unpickler: data is read, and nothing that a pickle names is called unless the list says so."""

from __future__ import annotations

import collections
import contextlib
import enum
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piledriver.core.safe_pickle import (
    DAMAGED_PICKLE,
    ForbiddenNameError,
    InertObject,
    load_inert,
    load_restricted_pickle,
)


class Colour(enum.Enum):
    RED = 1

    def danger(self) -> None: ...


class Other(enum.Enum):
    RED = 1


ALLOWED = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    (__name__, "Colour"): Colour,
    (__name__, "Other"): Other,
}


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.called = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.called


def read(value: Any, **options: Any) -> Any:
    return load_restricted_pickle(io.BytesIO(pickle.dumps(value)), ALLOWED, **options)


def test_listed_names_are_read_and_others_refused(tmp_path: Path) -> None:
    data = collections.OrderedDict(a=[1, (2.5, None)], b=b"bytes")
    assert read(data) == data
    with pytest.raises(ForbiddenNameError, match=r"names (posix|nt)\.mkdir, which is not data"):
        read(Calls(os.mkdir, str(tmp_path / "made")))
    assert not (tmp_path / "made").exists()


def test_an_enum_member_by_value_or_as_python_3_11_2_writes_it() -> None:
    by_value, by_name = Calls(Colour, 1), Calls(getattr, Colour, "RED")
    assert read(by_value) is Colour.RED
    assert read(by_name, enums=[Colour]) is Colour.RED
    with pytest.raises(ForbiddenNameError, match=r"builtins\.getattr"):
        read(by_name)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (Colour, "danger"),
        (Colour, "__class__"),
        (Colour, "__init_subclass__"),
        (Colour, "_member_map_"),
        (Other, "RED"),
        (collections.OrderedDict, "fromkeys"),
        ({"RED": 1}, "RED"),
        ("text", "format"),
        (Colour, 1),
    ],
)
def test_getattr_gives_members_of_the_enums_and_nothing_else(of: Any, name: Any) -> None:
    with pytest.raises(ForbiddenNameError, match=r"builtins\.getattr"):
        read(Calls(getattr, of, name), enums=[Colour])


def test_getattr_with_a_default_is_refused() -> None:
    with pytest.raises(DAMAGED_PICKLE):
        read(Calls(getattr, Colour, "BLUE", 3), enums=[Colour])


def test_inert_objects_keep_attributes_and_run_nothing(tmp_path: Path) -> None:
    sampler = io.BytesIO(pickle.dumps({"made": Calls(os.mkdir, str(tmp_path / "made")), "one": InertObject()}))
    found = load_inert(sampler)
    assert isinstance(found["made"], InertObject)
    assert not (tmp_path / "made").exists()
    shell = load_inert(io.BytesIO(pickle.dumps(pytest.approx(3.0))))
    assert vars(shell)["expected"] == 3.0


@given(st.binary(max_size=80), st.binary(max_size=20))
def test_noise_raises_what_is_announced(noise: bytes, tail: bytes) -> None:
    for content in (noise, pickle.dumps({"a": [Colour.RED, 1.5]})[:-3] + noise, b"\x80\x04" + noise + tail):
        with contextlib.suppress(*DAMAGED_PICKLE):
            load_restricted_pickle(io.BytesIO(content), ALLOWED, enums=[Colour])
        with contextlib.suppress(*DAMAGED_PICKLE):
            load_inert(io.BytesIO(content))
