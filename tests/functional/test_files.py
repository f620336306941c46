"""Files: whole and in part, to flax and back, and nothing runs that a file names."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import piledriver.functional as F
from piledriver.core.errors import CorruptFileError, StorageError
from piledriver.functional.errors import TreeStructureError
from piledriver.functional.serialization import msgpack


def a_state() -> F.TrainState:
    model, tokens = F.Decoder(17, 8, 1, 2, 12), torch.zeros(1, 3, dtype=torch.int64)
    state = F.TrainState.create(
        model.apply, model.init(F.key(0), tokens), F.chain(F.clip_by_global_norm(1.0), F.adamw(0.1))
    )
    _, grads = F.value_and_grad(lambda p: state.apply(p, tokens).square().mean())(state.params)
    return state.apply_gradients(grads)


def same(one: Any, other: Any) -> None:
    ours, theirs = F.tree_leaves(one), F.tree_leaves(other)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert a.equal(b)


def blank(state: Any) -> Any:
    return F.tree_map(torch.zeros_like, state)


def test_a_train_state_survives_both_formats(tmp_path: Path) -> None:
    state = a_state()
    F.save_safetensors(state, tmp_path / "state.safetensors")
    same(F.restore_safetensors(blank(state), tmp_path / "state.safetensors"), state)
    same(F.from_bytes(blank(state), F.to_bytes(state)), state)
    F.save_msgpack(state.params, tmp_path / "params.msgpack")
    same(F.load_msgpack(tmp_path / "params.msgpack"), state.params)


def test_parts_load_alone(tmp_path: Path) -> None:
    state, file = a_state(), tmp_path / "state.safetensors"
    F.save_safetensors(state, file)
    params_only = F.restore_part(blank(state), file, "params")
    same(params_only.params, state.params)
    assert int(params_only.step) == 0
    optimizer_only = F.restore_part(blank(state), file, "opt_state")
    same(optimizer_only.opt_state, state.opt_state)
    assert float(F.global_norm(optimizer_only.params)) == 0
    kernels = F.load_safetensors(file, F.every(F.path_contains("params"), F.path_matches(r"kernel$")))
    assert {path[-1] for path in F.flatten(kernels)} == {"kernel"}
    F.save_safetensors(state, tmp_path / "params.safetensors", only=lambda path, _: path[0] == "params")
    same(F.load_safetensors(tmp_path / "params.safetensors")["params"], state.params)
    with pytest.raises(TreeStructureError, match=r"no part 'optimizer'.*opt_state"):
        F.restore_part(state, file, "optimizer")
    with pytest.raises(TreeStructureError, match="has no part 'opt_state'"):
        F.restore_part(state, tmp_path / "params.safetensors", "opt_state")


def test_odd_leaves_and_names(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    tree = F.Tree(
        {"a.b": {"100%": shared}, "view": shared[1:], "epoch": 3, "half": torch.ones(2, dtype=torch.bfloat16)}
    )
    F.save_safetensors(tree, tmp_path / "odd.safetensors")
    loaded = F.load_safetensors(tmp_path / "odd.safetensors")
    assert loaded["epoch"] == 3
    assert loaded["a.b"]["100%"].equal(shared)
    assert loaded["half"].dtype == torch.bfloat16
    F.save_safetensors(tree, "memory://odd.safetensors")
    assert F.load_safetensors("memory://odd.safetensors")["view"].equal(shared[1:])


def test_tied_tensors_and_the_formats_own_name(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    tree = F.Tree(
        {"a": shared, "b": torch.nn.Parameter(shared), "__metadata__": shared[:2], "turned": shared.view(2, 2).T}
    )
    F.save_safetensors(tree, tmp_path / "tied.safetensors")
    loaded = F.load_safetensors(tmp_path / "tied.safetensors")
    assert loaded == F.tree_map(lambda leaf: leaf.detach(), tree)


def test_filters_see_shapes_before_anything_is_read(tmp_path: Path) -> None:
    tree = F.Tree({"w": torch.ones(2, 3), "b": torch.ones(3), "half": torch.ones(2, 2, dtype=torch.bfloat16), "n": 3})
    for location in (tmp_path / "some.safetensors", "memory://some.safetensors"):
        F.save_safetensors(tree, location)
        assert list(F.load_safetensors(location, F.has_dims(2))) == ["half", "w"]
        assert list(F.load_safetensors(location, F.has_dtype(torch.bfloat16))) == ["half"]


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (torch.ones(2, dtype=torch.complex128), "a.b is a torch.complex128"),
        (torch.ones(2, device="meta"), "a.b is a meta tensor"),
        (np.ones(2), "a.b is a ndarray.*torch.as_tensor"),
    ],
)
def test_what_safetensors_cannot_hold_is_named(leaf: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TreeStructureError, match=message):
        F.save_safetensors({"a": {"b": leaf}}, tmp_path / "none.safetensors")
    assert not list(tmp_path.iterdir())


def test_values_of_another_kind_are_not_squeezed_in() -> None:
    with pytest.raises(TreeStructureError, match=r"a is torch\.float32 in the file and torch\.int64 here"):
        F.from_bytes({"a": torch.tensor([1])}, F.to_bytes({"a": torch.tensor([1.5])}))
    with pytest.raises(TreeStructureError, match="a is a str in the file and a tensor here"):
        F.from_bytes({"a": torch.tensor([1])}, F.to_bytes({"a": "text"}))
    with pytest.raises(TreeStructureError, match="cannot write an array of object"):
        F.to_bytes({"a": np.array([None])})
    conjugate = torch.tensor([1 + 2j]).conj()
    assert F.restore(F.to_bytes({"a": conjugate}))["a"].equal(conjugate)


def test_shapes_alone_are_filled_with_numbers() -> None:
    model, x = F.Dense(3), torch.ones(1, 2)
    variables = model.init(F.key(0), x)
    assert F.from_bytes(model.eval_shape(x), F.to_bytes(variables)) == variables


def test_broken_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    F.save_safetensors(a_state(), file)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CorruptFileError, match="not a whole safetensors file"):
        F.load_safetensors(file)
    with pytest.raises(StorageError, match=r"missing\.safetensors"):
        F.load_safetensors(tmp_path / "missing.safetensors")


def test_another_architecture_is_an_error_with_its_path() -> None:
    content = F.to_bytes({"a": {"w": torch.ones(2)}})
    with pytest.raises(TreeStructureError, match=r"a\.w has the shape \(2,\) in the file and \(3,\) here"):
        F.from_bytes({"a": {"w": torch.ones(3)}}, content)
    with pytest.raises(TreeStructureError, match=r"a: the file lacks \['b'\] and has \['w'\]"):
        F.from_bytes({"a": {"b": torch.ones(2)}}, content)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda below: st.lists(below, max_size=20) | st.dictionaries(st.text(), below, max_size=20),
    max_leaves=30,
)


@given(values)
def test_msgpack_equals_the_reference_implementation(value: Any) -> None:
    reference = pytest.importorskip("msgpack")
    packed = msgpack.to_msgpack(value)
    assert packed == reference.packb(value)
    assert msgpack.restore(packed) == value


@given(values, st.data())
def test_a_cut_file_is_an_error_and_not_a_crash(value: Any, data: Any) -> None:
    packed = msgpack.to_msgpack([value, "end"])
    at = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(CorruptFileError):
        msgpack.restore(packed[:at])


@given(st.binary(max_size=60))
def test_noise_is_an_error_or_a_value(content: bytes) -> None:
    try:
        msgpack.restore(content)
    except CorruptFileError:
        return


@given(st.data())
def test_flipped_bytes_are_an_error_or_a_value(data: Any) -> None:
    tree = {"w": torch.arange(6.0).reshape(2, 3), "c": 1 + 2j, "pieces": {"__msgpack_chunked_array__": True}}
    content = bytearray(F.to_bytes(tree))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptFileError):
        F.restore(bytes(content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xdd\xff\xff\xff\xff" * 12, "truncated"),
        (b"\xdf\xff\xff\xff\xff", "truncated"),
        (b"\x91" * 100_000, "recursion"),
        (b"\xd6\xff\x00\x00\x00\x01", "a datetime"),
        (b"\x81\x91\x01\x01", "a key that is not text"),
        (b"\xd4\x07\x00", "unknown msgpack extension 7"),
        (b"\x01\x01", "trailing"),
        (b"\xa1\xff", "utf-8"),
    ],
)
def test_hostile_msgpack_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(CorruptFileError, match=message):
        F.restore(content)


def test_numbers_of_numpy_and_numbers_that_do_not_fit() -> None:
    assert F.restore(F.to_bytes({"a": np.float64(2.5), "b": True})) == {"a": 2.5, "b": True}
    with pytest.raises(TreeStructureError, match="does not fit in 64 bits"):
        F.to_bytes({"a": 2**64})
    with pytest.raises(TreeStructureError, match="cannot write a set"):
        F.to_bytes({"a": {1, 2}})


def test_large_arrays_are_cut_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgpack, "_CHUNK_BYTES", 16)
    tree = {"w": torch.arange(30.0).reshape(5, 6), "small": torch.ones(2)}
    same(F.from_bytes(blank(tree), F.to_bytes(tree)), tree)


DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "bool", "complex64", "float8_e4m3fn"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_flax_reads_ours_and_we_read_flax(dtype: str) -> None:
    serialization = pytest.importorskip("flax.serialization")
    value = torch.arange(6).reshape(2, 3).to(torch.float32).to(getattr(torch, dtype))
    tree = {"params": {"layer": {"kernel": value, "empty": value[:0]}}, "step": 3, "opt": (torch.ones(2), {})}
    theirs = serialization.msgpack_restore(F.to_bytes(tree))
    array = theirs["params"]["layer"]["kernel"]
    assert array.dtype.name == dtype
    assert array.shape == (2, 3)
    assert theirs["step"] == 3
    assert F.to_bytes(theirs) == serialization.to_bytes(theirs)
    back = F.from_bytes(tree, serialization.to_bytes(theirs))
    assert back["params"]["layer"]["kernel"].equal(value)
    assert back["opt"][0].equal(torch.ones(2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_flax_train_state_and_ours_exchange_files(monkeypatch: pytest.MonkeyPatch) -> None:
    serialization = pytest.importorskip("flax.serialization")
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    params = {"dense": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}}
    theirs = optax.adamw(0.1).init(jax.tree.map(jax.numpy.asarray, params))
    ours = F.adamw(0.1).init(F.tree_map(torch.from_numpy, F.Tree(params)))
    assert serialization.to_bytes(theirs) == F.to_bytes(ours)
    same(F.from_bytes(ours, serialization.to_bytes(theirs)), ours)
    restored = serialization.from_bytes(theirs, F.to_bytes(ours))
    assert jax.tree.structure(restored) == jax.tree.structure(theirs)
    model, x = F.Dense(3), torch.ones(1, 2)
    state = F.TrainState.create(model.apply, model.init(F.key(0), x), F.adamw(0.1))
    train_state = pytest.importorskip("flax.training.train_state")
    their_state = train_state.TrainState.create(
        apply_fn=None, params=F.tree_map(lambda leaf: leaf.numpy(), state.params).to_dict(), tx=optax.adamw(0.1)
    )
    same(F.from_bytes(blank(state), serialization.to_bytes(their_state)), state)
    read = serialization.from_bytes(their_state, F.to_bytes(state))
    np.testing.assert_array_equal(read.params["kernel"], state.params["kernel"].numpy())
    # flax cuts arrays above a size; ours joins what it cut.
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 8)
    same(F.restore(serialization.to_bytes(params))["dense"]["kernel"], torch.from_numpy(params["dense"]["kernel"]))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo ran > evil.txt",)


def test_pickles_of_data_are_read_and_others_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"params": {"w": np.arange(6.0).reshape(2, 3), "b": np.float32(2.5)}, "list": [np.ones(2), "text"]}
    for protocol in range(2, 6):
        Path("data.pkl").write_bytes(pickle.dumps(collections.OrderedDict(data), protocol=protocol))
        loaded = F.load_pickle("data.pkl")
        assert loaded.at("params.w").equal(torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
        assert loaded.at("params.b") == 2.5
        assert loaded["list"][1] == "text"
    Path("evil.pkl").write_bytes(pickle.dumps({"w": Evil()}))
    with pytest.raises(CorruptFileError, match=r"names (posix|nt)\.system, which is not data"):
        F.load_pickle("evil.pkl")
    assert not Path("evil.txt").exists()
    Path("cut.pkl").write_bytes(pickle.dumps(data)[:-20])
    with pytest.raises(CorruptFileError):
        F.load_pickle("cut.pkl")
    torch.save({"w": torch.ones(2)}, "torch.pt")
    assert F.load_pickle("torch.pt")["w"].equal(torch.ones(2))


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.called = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.called


@pytest.mark.parametrize(
    "hostile",
    [
        # Numpy makes an array of pointers of it, and the process dies when it looks at one.
        Calls(np.ndarray, (1,), "O", b"12345678"),
        Calls(np.ndarray, (10**13,), "f8"),
        Calls(bytearray, 10**13),
        np.array([{}], dtype=object),
        np.zeros(2, [("x", "f4")]),
        torch.nn.ReLU(),
    ],
    ids=["pointers", "huge", "huge bytes", "objects", "struct", "module"],
)
def test_hostile_pickles_are_refused(hostile: Any, tmp_path: Path) -> None:
    (tmp_path / "hostile.pkl").write_bytes(pickle.dumps({"w": hostile}))
    with pytest.raises(CorruptFileError, match="is not a pickle of plain data"):
        F.load_pickle(tmp_path / "hostile.pkl")


def test_torch_files_old_and_new(tmp_path: Path) -> None:
    for is_zip in (True, False):
        torch.save({"w": torch.ones(2)}, tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
        assert F.load_pickle(tmp_path / "w.pt") == {"w": torch.ones(2)}
        torch.save(torch.nn.ReLU(), tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
        with pytest.raises(CorruptFileError, match=r"it names torch\.nn\.modules\.activation\.ReLU, which is not data"):
            F.load_pickle(tmp_path / "w.pt")


def test_arrays_of_every_order_are_read(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    (tmp_path / "order.pkl").write_bytes(pickle.dumps({"turned": array.T, "big": array, "words": array.astype("u2")}))
    loaded = F.load_pickle(tmp_path / "order.pkl")
    expected = torch.arange(6.0).reshape(2, 3)
    assert loaded == {"turned": expected.T, "big": expected, "words": expected.to(torch.uint16)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_pickled_jax_arrays_are_read(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    frozen = pytest.importorskip("flax.core").freeze
    tree = frozen({"w": jax.numpy.ones((2, 3)), "h": jax.numpy.ones(2, dtype="bfloat16")})
    (tmp_path / "flax.pkl").write_bytes(pickle.dumps(tree))
    loaded = F.load_pickle(tmp_path / "flax.pkl")
    assert loaded["w"].equal(torch.ones(2, 3))
    assert loaded["h"].equal(torch.ones(2, dtype=torch.bfloat16))


def test_a_key_keeps_the_names_that_were_folded_into_it() -> None:
    for key in (F.key(3), F.fold_in(F.key(3), "dropout"), F.fold_in(F.fold_in(F.key(3), "a"), "b")):
        again = F.from_bytes({"key": F.fold_in(F.key(0), "other")}, F.to_bytes({"key": key}))["key"]
        assert F.bits(again, (4,)).equal(F.bits(key, (4,)))
