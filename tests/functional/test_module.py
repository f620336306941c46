"""Modules: pure apply, stable names, collections, and errors that name the place and the fix."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import piledriver.functional as F
from piledriver.functional import errors
from piledriver.functional.initialisers import ones, zeros


class MLP(F.Module):
    hidden: int = 8
    extra: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        if self.extra:
            x = self.child("before", F.Dense(width))(x)
        x = torch.relu(self.child("up", F.Dense(self.hidden))(x))
        self.sow("intermediates", "hidden", x)
        return self.child("down", F.Dense(width))(self.perturb("hidden", x))

    def encode(self, x: Tensor) -> Tensor:
        return self.child("up", F.Dense(self.hidden))(x)


class Counter(F.Module):
    def __call__(self, x: Tensor) -> Tensor:
        count = self.variable("counts", "calls", lambda: torch.zeros((), dtype=torch.int64))
        count.value = count.value + 1
        count.value = count.value + 1
        return x + count.value


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_init_infers_shapes_and_apply_is_pure() -> None:
    model = MLP()
    variables = model.init(F.key(0), X)
    assert F.tree_map(lambda leaf: tuple(leaf.shape), variables["params"]).to_dict() == {
        "up": {"kernel": (4, 8), "bias": (8,)},
        "down": {"kernel": (8, 4), "bias": (4,)},
    }
    before = F.tree_map(torch.clone, variables)
    first, second = model.apply(variables, X), model.apply(variables, X)
    assert first.equal(second)
    assert all(a.equal(b) for a, b in zip(F.tree_leaves(before), F.tree_leaves(variables), strict=True))


def test_init_is_a_function_of_key_and_path_alone() -> None:
    plain, extended = MLP().init(F.key(0), X), MLP(extra=True).init(F.key(0), X)
    for name in ("up", "down"):
        assert plain["params"][name]["kernel"].equal(extended["params"][name]["kernel"])
    assert not MLP().init(F.key(1), X)["params"]["up"]["kernel"].equal(plain["params"]["up"]["kernel"])


def test_nothing_is_allocated_to_infer_shapes() -> None:
    huge = F.Decoder(vocab_size=200_000, dim=16_384, depth=2, heads=128, mlp_dim=65_536)
    tokens = torch.zeros(1024, 8192, dtype=torch.int64, device="meta")
    abstract = huge.eval_shape(tokens)
    assert all(leaf.device.type == "meta" for leaf in F.tree_leaves(abstract))
    assert abstract.at("params.embed.embedding").shape == (200_000, 16_384)
    spec = huge.spec(tokens)
    assert spec.at("params.layers_0.mlp.gate.kernel") == F.Spec((16_384, 65_536), torch.float32, ("embed", "mlp"))


def test_eval_shape_of_a_function() -> None:
    model = MLP()
    variables = F.eval_shape(lambda: model.init(F.key(0), X))
    assert F.eval_shape(model, variables, X).shape == (3, 4)
    output, variables = model.init_with_output(F.key(0), X)
    assert output.equal(model.apply(variables, X))


def test_collections_come_back_and_the_old_ones_stay() -> None:
    model = Counter()
    variables = model.init(F.key(0), X)
    assert int(variables["counts"]["calls"]) == 0
    out, updated = model.apply(variables, X, mutable=["counts"])
    assert int(updated["counts"]["calls"]) == 2
    assert out.equal(X + 2)
    assert int(variables["counts"]["calls"]) == 0
    _, again = model.apply(variables.merge(updated), X, mutable=True)
    assert int(again["counts"]["calls"]) == 4


def test_sow_and_perturb() -> None:
    model = MLP()
    variables = model.init(F.key(0), X)
    assert isinstance(model.apply(variables, X), Tensor)
    out, sown = model.apply(variables, X, mutable="intermediates")
    (hidden,) = sown["intermediates"]["hidden"]
    grads = F.grad(lambda p: model.apply(variables.set("perturbations", p), X).sum())(variables["perturbations"])
    expected = variables.at("params.down.kernel").sum(1).expand(3, 8)
    torch.testing.assert_close(grads["hidden"], expected)
    assert hidden.shape == (3, 8)
    assert out.equal(model.apply(variables, X))


def test_methods_bind_and_unbind() -> None:
    model = MLP()
    variables = model.init(F.key(0), X)
    by_name = model.apply(variables, X, method="encode")
    assert by_name.equal(model.apply(variables, X, method=MLP.encode))
    bound = model.bind(variables)
    assert bound.encode(X).equal(by_name)
    assert bound(X).equal(bound(X))
    module, held = bound.unbind()
    assert module == model
    assert held == variables


def test_init_and_apply_take_methods_by_name_function_or_bound() -> None:
    model = MLP()
    variables = model.init(F.key(0), X, method="encode")
    assert list(variables["params"]) == ["up"]
    expected = model.bind(variables).encode(X)
    for method in ("encode", MLP.encode, model.encode, lambda module, x: module.encode(x)):
        assert model.apply(variables, X, method=method).equal(expected)
    with pytest.raises(errors.TransformError, match=r"MLP has no method 'encoed'.*did you mean 'encode'"):
        model.apply(variables, X, method="encoed")


def test_a_variable_is_made_from_arguments_and_a_parameter_from_any_sizes() -> None:
    class Shifted(F.Module):
        def __call__(self, x: Tensor) -> Tensor:
            mean = self.variable("stats", "mean", torch.zeros, (4,))
            one, two = self.param("one", zeros, 4), self.param("two", zeros, [4])  # type: ignore[arg-type]
            return x - mean.value + one + two

    variables = Shifted().init(F.key(0), X)
    assert variables.at("stats.mean").shape == variables.at("params.one").shape == (4,)
    assert Shifted().apply(variables, X).equal(X)


def test_initial_values_have_the_declared_dtype() -> None:
    class Wide(F.Module):
        def __call__(self, x: Tensor) -> Tensor:
            return x * self.param("w", lambda *_: torch.zeros(4, dtype=torch.float64), (4,))

    assert Wide().init(F.key(0), X).at("params.w").dtype == Wide().eval_shape(X).at("params.w").dtype == torch.float32


@pytest.mark.parametrize("name", ["init", "apply", "param", "path", "child"])
def test_names_of_the_machinery_are_refused_where_they_are_defined(name: str) -> None:
    with pytest.raises(errors.TransformError, match=f"Taken defines '{name}'"):
        type("Taken", (F.Module,), {name: None, "__annotations__": {name: "int"}})
    with pytest.raises(errors.TransformError, match=f"Taken defines '{name}'"):
        type("Taken", (F.Module,), {name: lambda self: None})


def test_a_shared_child_is_one_parameter() -> None:
    class Twice(F.Module):
        def __call__(self, x: Tensor) -> Tensor:
            layer = self.child("layer", F.Dense(4))
            return layer(layer(x))

    variables = Twice().init(F.key(0), X)
    assert list(variables["params"]) == ["layer"]
    kernel, bias = variables.at("params.layer.kernel"), variables.at("params.layer.bias")
    torch.testing.assert_close(Twice().apply(variables, X), (X @ kernel + bias) @ kernel + bias)


def test_modules_are_values() -> None:
    assert MLP(3) == MLP(3) != MLP(4)
    assert hash(MLP(3)) == hash(MLP(3))
    assert MLP(3).clone(hidden=5) == MLP(5)
    with pytest.raises(errors.FrozenModuleError, match=r"MLP is frozen.*'hidden'.*clone\(hidden="):
        MLP().hidden = 3  # type: ignore[misc]


def failing(call: Any) -> type[F.Module]:
    class Failing(F.Module):
        def __call__(self, x: Tensor) -> Tensor:
            return self.child("inner", Inner())(x)

    class Inner(F.Module):
        def __call__(self, x: Tensor) -> Tensor:
            call(self, x)
            return x

    return Failing


def twice(kind: str) -> Any:
    def call(self: F.Module, x: Tensor) -> None:
        for _ in range(2):
            if kind == "parameter":
                self.param("same", zeros, (4,))
            elif kind == "child":
                self.child("same", F.Dense(1))
            else:
                self.variable("state", "same", lambda: torch.zeros(1))

    return call


@pytest.mark.parametrize("kind", ["parameter", "child", "variable"])
def test_a_name_used_twice_is_an_error_with_its_path(kind: str) -> None:
    with pytest.raises(errors.NameInUseError, match=rf"^inner: the {kind} name 'same' is used twice.*Fix: "):
        failing(twice(kind))().init(F.key(0), X)


def test_bad_names_and_initialisers() -> None:
    with pytest.raises(errors.InvalidNameError, match=r"inner: 'a\.b' cannot be a name"):
        failing(lambda self, x: self.param("a.b", zeros, (1,)))().init(F.key(0), X)
    with pytest.raises(errors.InitialiserError, match=r"inner: the initialiser of 'w'.*\(2,\), not \(3,\)"):
        failing(lambda self, x: self.param("w", lambda *_: torch.zeros(2), (3,)))().init(F.key(0), X)
    with pytest.raises(
        errors.InitialiserError, match=r"inner: the initialiser of 'w' cannot be called with \(key, shape"
    ):
        failing(lambda self, x: self.param("w", lambda key, shape: torch.zeros(shape), (3,)))().init(F.key(0), X)
    with pytest.raises(errors.InitialiserError, match="depends on the input"):
        failing(lambda self, x: self.variable("s", "w", lambda: x * 2))().init(F.key(0), X)


def test_wrong_variables_name_the_module_and_the_fix() -> None:
    model = MLP()
    variables = model.init(F.key(0), X)
    with pytest.raises(errors.ParameterShapeError, match=r"^up: parameter 'kernel' is stored as \(4, 8\).*\(5, 8\)"):
        model.apply(variables, torch.ones(3, 5))
    with pytest.raises(errors.MissingCollectionError, match=r"up: the variables have no collection 'params'.*init"):
        model.apply({}, X)
    with pytest.raises(errors.MissingVariableError, match=r"down: no 'bias'.*has kernel"):
        model.apply(variables.without("params.down.bias"), X)
    renamed = F.rename(variables, [(r"down\.bias", "down.bais")])
    with pytest.raises(errors.MissingVariableError, match="did you mean 'bais'"):
        model.apply(renamed, X)
    with pytest.raises(errors.TransformError, match="not a mapping"):
        model.apply({"params": torch.ones(1)}, X)


def test_missing_keys_collections_and_mutation() -> None:
    drop = failing(lambda self, x: F.Dropout(0.5).within(self)(x, deterministic=False))()
    with pytest.raises(errors.MissingKeyError, match=r"inner: needs a key of the stream 'dropout'.*rngs=\{'dropout'"):
        drop.apply({}, X, rngs={"params": F.key(0)})
    counter = Counter()
    variables = counter.init(F.key(0), X)
    with pytest.raises(errors.ImmutableCollectionError, match=r"wrote 'calls'.*mutable=\['counts'\]"):
        counter.apply(variables, X)
    with pytest.raises(errors.ImmutableCollectionError, match=r"\(mutable: count\)"):
        counter.apply(variables, X, mutable="count")
    with pytest.raises(errors.MissingCollectionError, match=r"no collection 'counts'.*\{'counts': \.\.\.\}"):
        counter.apply({}, X)
    with pytest.raises(errors.MissingVariableError, match="no 'calls' in collection 'counts'"):
        counter.apply({"counts": {"others": torch.zeros(1)}}, X)
    out, made = counter.apply({}, X, mutable=["counts"])
    assert int(made["counts"]["calls"]) == 2
    assert out.equal(X + 2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: model.init(0, X), r"of type int where its key belongs.*init\(key\(0\), x\)"),
        (lambda model: model.init(X), r"of type Tensor where its key belongs"),
        (lambda model: model.init({"dropout": F.key(0)}, X), r"needs a key of the stream 'params'.*given: dropout"),
        (lambda model: model.init(F.key(0), X.numpy()), r"holds a ndarray.*torch.as_tensor"),
        (lambda _: F.Dense(3).init(F.key(0), X.sum()), r"^\(root\): a number without dimensions"),
        (lambda model: model.apply(X), r"variables are of type Tensor.*module.apply\(variables, x\)"),
        (
            lambda model: model.apply(model.init(F.key(0), X)["params"], X),
            r"no collection 'params'.*\{'params': \.\.\.\}",
        ),
        (lambda model: model.apply({}, X, rngs=F.key(0)), r"rngs=\{'dropout': key\}"),
        (
            lambda _: failing(lambda self, x: self.child("a", torch.nn.Linear(4, 4)))().init(F.key(0), X),
            r"^inner: the child 'a' is of type Linear.*from_torch",
        ),
        (
            lambda _: failing(lambda self, x: self.child("a", F.Dense))().init(F.key(0), X),
            r"^inner: the child 'a' is Dense.*an instance",
        ),
        (
            lambda _: failing(lambda self, x: x if x.sum() > 0 else -x)().init(F.key(0), X),
            r"reads a number of its input.*in Inner at inner.*torch\.where",
        ),
        (
            lambda _: type("Late", (F.Module,), {"forward": lambda self, x: x})().init(F.key(0), X),
            "rename its `forward`",
        ),
        (
            lambda _: failing(lambda self, x: self.make_key())().apply({}, X, rngs={"dropout": 0}),
            r"^inner: the key of the stream 'dropout' is of type int",
        ),
    ],
)
def test_what_newcomers_pass_in_the_wrong_place_is_named(call: Any, said: str) -> None:
    with pytest.raises(errors.FunctionalError, match=said):
        call(MLP())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: F.Conv(3, kernel_size=3), r"Conv has no field 'kernel_size'.*flax's 'kernel_size' is 'window' here"),
        (lambda: F.MultiHeadAttention(num_heads=2), r"flax's 'num_heads' is 'heads' here"),
        (lambda: F.Dense(3, name="up"), r"name a module where it is used: `self\.child\('up', Dense"),
        (lambda: F.Dense(3, use_bais=True), r"Dense has no field 'use_bais'.*use_bias"),
        (lambda: MLP(hiden=3), r"MLP has no field 'hiden'.*hidden"),
    ],
)
def test_unknown_arguments_are_answered_with_ours(make: Any, said: str) -> None:
    with pytest.raises(errors.UnknownArgumentError, match=said):
        make()
    with pytest.raises(TypeError):
        make()


def test_modules_can_be_pickled_and_copied() -> None:
    from piledriver.functional.initialisers import constant, he_normal, variance_scaling

    for module in (
        F.Decoder(31, 16, 1, 4, 24, scan=True),
        F.Sequential([F.Dense(2, kernel_init=he_normal()), torch.relu, F.RNN(F.LSTMCell(3))]),
        F.Conv(3, 3, kernel_init=variance_scaling(1.0, "fan_out", "normal", [0, 1]), bias_init=constant(0.5)),
    ):
        for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
            assert other == module
            assert hash(other) == hash(module)
    model = MLP(3)
    bound = model.bind(model.init(F.key(0), X))
    assert pickle.loads(pickle.dumps(bound)) == model  # the module, without the variables
    assert he_normal(in_dims=[0]) == he_normal(in_dims=(0,)) != he_normal()


def test_setup_is_refused_where_it_is_defined() -> None:
    with pytest.raises(errors.TransformError, match=r"never called.*self\.child"):
        type("Late", (F.Module,), {"setup": lambda self: None})


def test_errors_of_torch_say_in_which_module_they_happened() -> None:
    broken = failing(lambda self, x: x @ torch.ones(9, 9))()
    with pytest.raises(RuntimeError) as caught:
        broken.apply({}, X)
    assert caught.value.__notes__ == ["in Inner at inner"]


def test_unbound_and_doubly_bound_modules() -> None:
    with pytest.raises(errors.UnboundModuleError, match=r"Dense is not bound.*apply\(variables"):
        F.Dense(3)(X)

    class Wrong(F.Module):
        def __call__(self, x: Tensor) -> Tensor:
            layer = self.child("layer", F.Dense(4))
            return self.child("again", layer)(x)

    with pytest.raises(errors.TransformError, match="already bound at 'layer'"):
        Wrong().init(F.key(0), X)


def test_a_bound_module_can_be_passed_to_another_one() -> None:
    class Head(F.Module):
        table: F.Embed

        def __call__(self, x: Tensor) -> Tensor:
            return self.table.attend(x) * self.param("scale", ones, (1,))

    class Model(F.Module):
        def __call__(self, tokens: Tensor) -> Tensor:
            embed = self.child("embed", F.Embed(7, 3))
            return self.child("head", Head(embed))(embed(tokens))

    tokens = torch.tensor([[1, 2]])
    variables = Model().init(F.key(0), tokens)
    assert list(F.flatten(variables["params"])) == [("embed", "embedding"), ("head", "scale")]
    table = variables.at("params.embed.embedding")
    torch.testing.assert_close(Model().apply(variables, tokens), table[tokens] @ table.T)


def test_init_on_another_device_and_in_another_dtype() -> None:
    variables = F.Dense(3, param_dtype=torch.float64).init(F.key(0), X, device="meta")
    assert variables.at("params.kernel").device.type == "meta"
    half = F.Dense(3, dtype=torch.bfloat16)
    assert half.apply(half.init(F.key(0), X), X).dtype == torch.bfloat16
    assert half.init(F.key(0), X).at("params.kernel").dtype == torch.float32
