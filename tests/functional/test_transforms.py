"""Transforms compose: each order and each compiled form equals the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import piledriver.functional as F
from piledriver.functional.errors import FunctionalError, ParameterShapeError, TransformError

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")


class Net(F.Module):
    width: int = 6
    remat: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        layer = F.Dense(self.width)
        x = torch.tanh(self.child("first", F.remat(layer) if self.remat else layer)(x))
        x = self.child("norm", F.LayerNorm())(x)
        return self.child("last", F.Dense(1))(x)


ONE = torch.ones(2)


def loss(params: F.Tree, x: Tensor) -> Tensor:
    return Net().apply({"params": params}, x).square().mean()


def equal(one: Any, other: Any) -> None:
    for a, b in zip(F.tree_leaves(one), F.tree_leaves(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def batch(seed: int, size: int) -> tuple[F.Tree, Tensor]:
    x = F.normal(F.key(seed), (size, 4))
    return Net().init(F.key(seed + 1), x)["params"], x


@given(st.integers(0, 1000), st.integers(1, 4))
@settings(max_examples=8, deadline=None)
def test_orders_of_grad_and_vmap_equal_the_loop(seed: int, size: int) -> None:
    params, x = batch(seed, size)
    each = [F.grad(loss)(params, row[None]) for row in x]
    per_example = F.tree_map(lambda *rows: torch.stack(rows), *each)
    equal(F.vmap(F.grad(loss), in_axes=(None, 0))(params, x[:, None]), per_example)

    def mean(params: F.Tree, x: Tensor) -> Tensor:
        return F.vmap(loss, in_axes=(None, 0))(params, x[:, None]).mean()

    equal(F.grad(mean)(params, x), F.tree_map(lambda rows: rows.mean(0), per_example))


def test_switch_takes_the_nearest_branch_eagerly_batched_and_compiled() -> None:
    branches = [lambda x: x + 1.0, lambda x: x * 3.0, lambda x: -x]
    x, indices = torch.tensor(2.0), torch.tensor([-4, 0, 1, 2, 9])
    expected = torch.tensor([3.0, 3.0, 6.0, -2.0, -2.0])
    assert torch.stack([F.switch(int(i), branches, x) for i in indices]).equal(expected)
    assert F.vmap(lambda i: F.switch(i, branches, x))(indices).equal(expected)
    compiled = F.jit(lambda i, x: F.switch(i, branches, x), backend="eager")
    assert torch.stack([compiled(i, x) for i in indices]).equal(expected)
    slopes = F.vmap(lambda i: F.grad(lambda x: F.switch(i, branches, x))(x))(indices)
    assert slopes.equal(torch.tensor([1.0, 1.0, 3.0, -1.0, -1.0]))
    with pytest.raises(TransformError, match="without branches"):
        F.switch(0, [], x)


def test_compiled_orders_equal_the_loop() -> None:
    params, x = batch(0, 3)
    per_example = F.vmap(F.grad(loss), in_axes=(None, 0))

    def mean(params: F.Tree, x: Tensor) -> Tensor:
        return F.vmap(loss, in_axes=(None, 0))(params, x[:, None]).mean()

    equal(F.jit(per_example, backend="aot_eager")(params, x[:, None]), per_example(params, x[:, None]))
    equal(F.jit(F.grad(mean), backend="aot_eager")(params, x), F.grad(mean)(params, x))
    equal(F.grad(F.jit(loss, backend="aot_eager"))(params, x), F.grad(loss)(params, x))


def test_engines_agree_and_second_derivatives_nest() -> None:
    params, x = batch(1, 5)
    equal(F.grad(loss)(params, x), torch.func.grad(loss)(params, x))

    def norm(params: F.Tree) -> Tensor:
        return sum((leaf.square().sum() for leaf in F.tree_leaves(F.grad(loss)(params, x))), torch.zeros(()))

    def norm_by_func(params: F.Tree) -> Tensor:
        found = F.tree_leaves(torch.func.grad(loss)(params, x))
        return sum((leaf.square().sum() for leaf in found), torch.zeros(()))

    equal(F.grad(norm)(params), torch.func.grad(norm_by_func)(params))


def test_gradients_leave_no_trace() -> None:
    params, x = batch(2, 3)
    value, grads = F.value_and_grad(loss)(params, x)
    assert not value.requires_grad
    assert not any(leaf.requires_grad for leaf in F.tree_leaves((params, grads)))
    (_, aux), _ = F.value_and_grad(lambda p: (loss(p, x), {"x": x * p["last"]["bias"]}), has_aux=True)(params)
    assert not aux["x"].requires_grad
    unused = F.grad(lambda tree: tree["a"].sum())({"a": torch.ones(2), "b": torch.ones(3)})
    assert unused["b"].equal(torch.zeros(3))
    first, second = F.grad(lambda a, b: (a * b).sum(), argnums=(0, 1))(torch.ones(2), torch.full((2,), 3.0))
    assert (first.tolist(), second.tolist()) == ([3, 3], [1, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.grad(lambda x: x)(torch.ones(2)), "return one number"),
        (lambda: F.grad(lambda x: x.sum())(torch.ones(2, dtype=torch.int64)), "choose other argnums"),
        (lambda: F.grad(lambda x: x.sum(), argnums=1)(torch.ones(2)), "count from 0"),
        (lambda: F.vmap(3), "pass a function or a module"),
        (lambda: F.scan(lambda c, x: (c, x), torch.ones(1), {"a": torch.ones(2), "b": torch.ones(3)}), "same length"),
        (lambda: F.scan(lambda c, x: (c, x), torch.ones(1)), "xs= or length="),
        (lambda: F.scan(lambda c, x: c, torch.ones(1), torch.ones(2)), r"return `\(carry, y\)`"),
        (lambda: F.scan(lambda c, x: (c, x), torch.ones(1), torch.tensor(1.0)), "first dimension"),
        (lambda: F.cond(torch.tensor([True, False]), torch.sin, torch.cos, ONE), r"shape \(2,\).*torch.where"),
        (lambda: F.value_and_grad(lambda x: x.sum(), has_aux=True)(ONE), "returns a Tensor.*pair"),
        (lambda: F.value_and_grad(lambda x: (x.sum(), x))(ONE), "has_aux=True"),
    ],
)
def test_wrong_uses_teach(call: Any, message: str) -> None:
    with pytest.raises(TransformError, match=message):
        call()


def test_modules_stand_for_their_apply() -> None:
    params, x = batch(3, 4)
    variables, net = F.Tree({"params": params}), Net()
    equal(F.vmap(net, in_axes=(None, 0))(variables, x), net.apply(variables, x))
    value, pull = F.vjp(net, variables, x)
    equal(pull(torch.ones_like(value))[1], F.grad(lambda x: net.apply(variables, x).sum())(x))
    tangent = F.normal(F.key(0), x.shape)
    _, along = F.jvp(lambda x: net.apply(variables, x), (x,), (tangent,))
    equal(along.sum(), (F.grad(lambda x: net.apply(variables, x).sum())(x) * tangent).sum())


def test_remat_keeps_values_gradients_and_dropout() -> None:
    params, x = batch(4, 3)
    counted: list[int] = []

    def inner(params: F.Tree, x: Tensor) -> dict[str, Any]:
        counted.append(1)
        dropped = F.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": F.key(0)})
        return {"out": Net().apply({"params": params}, dropped), "count": torch.tensor(3), "name": "inner"}

    def outer(function: Any) -> Any:
        return lambda params, x: function(params, x)["out"].square().sum()

    expected = F.grad(outer(inner))(params, x)
    counted.clear()
    equal(F.grad(outer(F.remat(inner)))(params, x), expected)
    assert len(counted) == 2
    equal(torch.func.grad(outer(F.remat(inner)))(params, x), expected)
    per_row = F.vmap(F.grad(outer(F.remat(inner))), in_axes=(None, 0))(params, x[:, None])
    equal(per_row, F.vmap(F.grad(outer(inner)), in_axes=(None, 0))(params, x[:, None]))
    assert F.remat(inner)(params, x)["name"] == "inner"


def test_remat_saves_memory() -> None:
    def deep(x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.sin(x)
        return x

    def saved(function: Any) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            function(torch.ones(100, requires_grad=True))
        return sum(sizes)

    assert saved(deep) == 2000
    assert saved(F.remat(deep)) == 100


def test_remat_in_second_derivatives_and_compiled() -> None:
    params, x = batch(5, 3)

    def with_remat(params: F.Tree, x: Tensor) -> Tensor:
        return Net(remat=True).apply({"params": params}, x).square().mean()

    assert list(F.flatten(Net(remat=True).init(F.key(0), x))) == list(F.flatten(Net().init(F.key(0), x)))

    def norm(function: Any) -> Any:
        return lambda params: F.grad(function)(params, x)["first"]["kernel"].square().sum()

    equal(F.grad(norm(with_remat))(params), F.grad(norm(loss))(params))
    equal(F.jit(F.grad(with_remat), backend="aot_eager")(params, x), F.grad(loss)(params, x))
    equal(F.grad(F.jit(with_remat, backend="aot_eager"))(params, x), F.grad(loss)(params, x))


class Noisy(F.Module):
    def __call__(self, x: Tensor) -> Tensor:
        mean = self.variable("stats", "mean", lambda: torch.zeros(()))
        if not self.is_initialising:
            mean.value = mean.value + x.mean()
        return self.child("dense", F.Dense(x.shape[-1]))(x) + F.uniform(self.make_key("noise"), x.shape)


def test_scanned_equals_the_loop_with_state_and_keys() -> None:
    x = F.normal(F.key(0), (3, 4))
    scanned = F.Scanned(Noisy(), 3)
    variables = scanned.init(F.key(0), x)
    assert variables.at("params.dense.kernel").shape == (3, 4, 4)
    out, updated = scanned.apply(variables, x, rngs={"noise": F.key(1)}, mutable=["stats"])
    carry, means = x, []
    for i in range(3):
        one = F.tree_map(lambda leaf, i=i: leaf[i], variables)
        carry, own = Noisy().apply(one, carry, rngs={"noise": F.fold_in(F.key(1), i)}, mutable=["stats"])
        means.append(own["stats"]["mean"])
    equal(out, carry)
    equal(updated["stats"]["mean"], torch.stack(means))
    with pytest.raises(TransformError, match="number of scanned layers, 2"):
        F.Scanned(Noisy(), 2).apply(variables, x, rngs={"noise": F.key(1)})


def test_scanned_outputs_are_stacked() -> None:
    class Step(F.Module):
        def __call__(self, carry: Tensor) -> tuple[Tensor, Tensor]:
            out = self.child("dense", F.Dense(2))(carry)
            return out, out.sum()

    scanned, x = F.Scanned(Step(), 4, has_outputs=True), torch.ones(2)
    (carry, outputs), variables = scanned.init_with_output(F.key(0), x)
    assert outputs.shape == (4,)
    equal(outputs[-1], carry.sum())
    assert variables.at("params.dense.kernel").shape == (4, 2, 2)


def test_vmapped_equals_the_loop_with_state_and_keys() -> None:
    x = F.normal(F.key(0), (3, 5, 4))
    mapped = F.Vmapped(Noisy(), 3)
    variables = mapped.init(F.key(0), x)
    assert not variables.at("params.dense.kernel")[0].equal(variables.at("params.dense.kernel")[1])
    out, updated = mapped.apply(variables, x, rngs={"noise": F.key(1)}, mutable=["stats"])
    keys = F.split(F.key(1), 3)
    for i in range(3):
        one = F.tree_map(lambda leaf, i=i: leaf[i], variables)
        expected, own = Noisy().apply(one, x[i], rngs={"noise": keys[i]}, mutable=["stats"])
        equal(out[i], expected)
        equal(updated["stats"]["mean"][i], own["stats"]["mean"])
    shared = F.Vmapped(F.Dense(2), 3, in_axes=1, shared=("params",))
    variables = shared.init(F.key(0), x.movedim(0, 1))
    assert variables.at("params.kernel").shape == (4, 2)
    equal(shared.apply(variables, x.movedim(0, 1)), F.Dense(2).apply(variables, x))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (F.Scanned(F.Dense(5), 3), r"was given \[\(2, 4\)\] and returned \[\(2, 5\)\]"),
        (F.Scanned(F.Dense(4), 0), "0 scanned layers"),
        (F.Vmapped(F.Dense(4), 3), r"shape \(2, 4\) for 3 copies over dimension 0"),
        (F.Vmapped(F.Dense(4), 2, in_axes=(0, 0)), "1 inputs with 2 in_axes"),
    ],
)
def test_lifts_that_cannot_be_are_named_by_init(module: F.Module, said: str) -> None:
    class Outer(F.Module):
        def __call__(self, x: Tensor) -> Tensor:
            return self.child("lifted", module)(x)

    with pytest.raises(FunctionalError, match=rf"^lifted: .*{said}"):
        Outer().init(F.key(0), torch.ones(2, 4))


def test_lifts_nest() -> None:
    x = F.normal(F.key(0), (2, 4))
    model = F.Scanned(F.Remat(F.Vmapped(F.Dense(4), 2)), 3)
    variables = model.init(F.key(0), x)
    assert variables.at("params.kernel").shape == (3, 2, 4, 4)
    carry = x
    for i in range(3):
        carry = torch.stack([carry[j] @ variables.at("params.kernel")[i, j] for j in range(2)])
    equal(model.apply(variables, x), carry)
    F.grad(lambda v: model.apply(v, x).sum())(variables)


def test_control_flow() -> None:
    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return carry * 0.5 + x, carry + x

    xs = F.normal(F.key(0), (5, 3))
    carry, ys = F.scan(step, torch.zeros(3), xs)
    back, _ = F.scan(step, torch.zeros(3), xs.flip(0), reverse=True)
    equal(back, carry)
    assert ys.shape == (5, 3)
    assert F.scan(lambda c, _: (c + 1, c), torch.tensor(0), length=4)[1].tolist() == [0, 1, 2, 3]
    equal(F.grad(lambda x: F.scan(step, torch.zeros(3), x)[0].sum())(xs)[:, 0], 0.5 ** torch.arange(4.0, -1, -1))
    assert F.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, torch.tensor(1)) == 2
    assert F.fori_loop(0, 4, lambda i, c: c + i, 0) == 6


def test_control_flow_compiles_to_operators() -> None:
    def choose(x: Tensor) -> Tensor:
        return F.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), x)

    def grow(x: Tensor) -> Tensor:
        return F.while_loop(
            lambda c: c["n"] < 5, lambda c: {"n": c["n"] + 1, "x": c["x"] * 2}, {"n": torch.tensor(0), "x": x}
        )["x"]

    compiled_choose, compiled_grow = F.jit(choose, backend="aot_eager"), F.jit(grow, backend="aot_eager")
    for x in (torch.ones(2), -torch.ones(2)):
        equal(compiled_choose(x), choose(x))
        equal(compiled_grow(x), grow(x))


def test_scan_operator_equals_the_loop() -> None:
    def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return carry + x, carry * x

    xs = F.normal(F.key(0), (4, 3))
    compiled = F.jit(lambda c, x: F.scan(step, c, x, unroll=False), backend="aot_eager")
    equal(compiled(torch.zeros(3), xs), F.scan(step, torch.zeros(3), xs))


def test_donated_memory_is_reused() -> None:
    params, x = batch(6, 4)
    state = F.TrainState.create(Net().apply, {"params": F.tree_map(torch.clone, params)}, F.adam(1e-2))

    def step(state: F.TrainState, x: Tensor) -> tuple[F.TrainState, Tensor]:
        value, grads = F.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads), value

    expected, first = step(state, x)
    kernel = state.params["first"]["kernel"]
    after, value = F.jit(step, donate=True, backend="aot_eager")(state, x)
    equal((after.params, after.opt_state, value), (expected.params, expected.opt_state, first))
    assert after.params["first"]["kernel"] is kernel
    assert after.params["first"]["kernel"].data_ptr() == kernel.data_ptr()


def test_a_step_compiles_once_for_all_steps_and_keys() -> None:
    traces: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traces.append(1)
        return graph.forward

    def noisy(state: dict[str, Tensor], key: F.Key) -> dict[str, Tensor]:
        return {"step": state["step"] + 1, "x": state["x"] + F.uniform(F.fold_in(key, state["step"]), (3,))}

    compiled = torch.compile(noisy, backend=backend, fullgraph=True)
    state = {"step": torch.tensor(0), "x": torch.zeros(3)}
    expected = dict(state)
    for i in range(4):
        state, expected = compiled(state, F.key(i)), noisy(expected, F.key(i))
        equal(state, expected)
    assert len(traces) == 1


def test_a_compiled_decoder_takes_every_length_and_forward_mode() -> None:
    model = F.Decoder(31, 16, 1, 4, 24)
    params = model.init(F.key(0), torch.zeros(1, 4, dtype=torch.int64))["params"]

    def logits(params: F.Tree, tokens: Tensor) -> Tensor:
        return model.apply({"params": params}, tokens)

    def along(params: F.Tree, tokens: Tensor) -> Tensor:
        return F.jvp(lambda params: logits(params, tokens), (params,), (params,))[1]

    torch.compiler.reset()
    compiled, compiled_along = (F.jit(one, backend="aot_eager") for one in (logits, along))
    for length in (5, 9):
        tokens = F.randint(F.key(length), (2, length), 0, 31)
        equal(compiled(params, tokens), logits(params, tokens))
        equal(compiled_along(params, tokens), along(params, tokens))


def test_every_jit_has_graphs_of_its_own() -> None:
    x = torch.arange(3.0)
    for power in range(2, 2 + 2 * torch._dynamo.config.recompile_limit):
        compiled = F.jit(F.grad(lambda x, power=power: (x**power).sum()), backend="eager")
        equal(compiled(x), power * x ** (power - 1))


def test_what_only_moves_in_a_donated_state_keeps_its_numbers() -> None:
    def learn(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"now": state["now"] + 1, "target": state["now"]}

    state = {"now": torch.ones(2), "target": torch.zeros(2)}
    after = F.jit(learn, donate=True, backend="eager")(state)
    assert (after["now"].tolist(), after["target"].tolist()) == ([2, 2], [1, 1])


@pytest.mark.parametrize(
    ("step", "state", "said"),
    [
        (lambda s: {"a": s["a"].sum()}, {"a": ONE}, r"\(2,\).* to become \(\)"),
        (lambda s: {"a": s["a"].double()}, {"a": ONE}, "float64"),
        (lambda s: {"a": s["a"], "n": s["n"] + 1}, {"a": ONE, "n": 1}, r"1 in the donated state.*tensor"),
        (lambda s: {"a": s["a"], "b": s["a"]}, {"a": ONE}, "1 leaves for 2"),
        (lambda s: s, {"a": ONE, "b": ONE}, "one tensor in two places"),
    ],
)
def test_what_cannot_be_donated_is_refused(step: Any, state: Any, said: str) -> None:
    with pytest.raises(TransformError, match=said):
        F.jit(step, donate=True, backend="eager")(state)


def test_compiled_functions_say_what_eager_ones_say() -> None:
    params, x = batch(0, 2)
    with pytest.raises(ParameterShapeError, match=r"^first: parameter 'kernel' is stored as \(4, 6\)"):
        F.jit(F.value_and_grad(loss), backend="eager")(params, torch.ones(2, 5))
    with pytest.raises(TransformError, match="return one number"):
        F.jit(F.grad(lambda x: x), backend="eager")(x)


def test_anything_may_stand_beside_a_compiled_value() -> None:
    params, x = batch(0, 2)

    def with_aux(params: F.Tree, x: Tensor) -> tuple[Tensor, Any]:
        return loss(params, x), {"rows": 2, "name": "first", "twice": x * 2}

    (_, aux), grads = F.jit(F.value_and_grad(with_aux, has_aux=True), backend="eager")(params, x)
    equal((aux.pop("twice"), grads), (x * 2, F.grad(loss)(params, x)))
    assert aux == {"rows": 2, "name": "first"}
    bare = F.jit(F.grad(lambda params, x: (loss(params, x), None), has_aux=True), backend="eager")
    assert bare(params, x)[1] is None


def test_jit_decorates_with_and_without_settings() -> None:
    @F.jit(backend="eager", donate=True)
    def step(x: Tensor) -> Tensor:
        return x + 1

    x = torch.zeros(2)
    assert step(x) is x
    assert x.tolist() == [1, 1]


def test_axes_of_trees_are_written_as_dicts() -> None:
    x, net = F.normal(F.key(0), (4, 4)), Net()
    several = F.vmap(lambda key: net.init(key, x))(F.split(F.key(0), 3))
    equal(several.at("params.first.kernel")[1], net.init(F.split(F.key(0), 3)[1], x).at("params.first.kernel"))
    out = F.vmap(net.apply, in_axes=({"params": 0}, None))(several, x)
    equal(out[2], net.apply(F.tree_map(lambda leaf: leaf[2], several), x))
    with pytest.raises(TransformError, match="in_axes has the names param where the argument has params"):
        F.vmap(net.apply, in_axes=({"param": 0}, None))(several, x)


def test_remat_refuses_tensors_from_outside_that_need_a_gradient() -> None:
    params, x = batch(1, 2)
    with pytest.raises(TransformError, match=r"tensor from outside.*pass it as an argument"):
        F.grad(lambda params: F.remat(lambda x: loss(params, x))(x))(params)
    equal(F.grad(lambda x: F.remat(lambda x: loss(params, x))(x))(x), F.grad(lambda x: loss(params, x))(x))
    weight = torch.nn.Parameter(ONE)
    with torch.no_grad():
        assert F.remat(lambda x: (x * weight).sum())(ONE) == 2
    equal(F.jvp(F.remat(loss), (params, x), (params, x)), F.jvp(loss, (params, x), (params, x)))


def test_branches_differentiate_by_every_engine() -> None:
    def choose(x: Tensor) -> Tensor:
        return F.cond(x.sum() > 0, lambda x: (x * 2).sum(), lambda x: (x * 3).sum(), x)

    for x, slope in ((torch.ones(2), 2.0), (-torch.ones(2), 3.0)):
        for found in (F.grad(choose), torch.func.grad(choose), F.jit(F.grad(choose), backend="aot_eager")):
            assert found(x).tolist() == [slope, slope]


def test_scans_without_outputs_or_with_numbers() -> None:
    assert F.scan(lambda total, x: (total + x, None), torch.tensor(0.0), torch.ones(3)) == (torch.tensor(3.0), None)
    assert F.scan(lambda n, _: (n + 1, n), 0, length=3)[1].tolist() == [0, 1, 2]


def test_donating_takes_the_state_by_position() -> None:
    with pytest.raises(TransformError, match="pass the state first"):
        F.jit(lambda state: state, donate=True, backend="eager")(state=torch.ones(2))
