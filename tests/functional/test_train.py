"""Pure training: states, scaling, averages, metrics, and optimizers against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import piledriver.functional as F
from piledriver.core.errors import UsageError
from piledriver.functional.errors import FunctionalError, TransformError, TreeStructureError
from piledriver.functional.optimizers.muon import default_label, orthogonal_update
from piledriver.functional.surgery import mask_tree

PARAMS = F.Tree({"dense": {"kernel": F.normal(F.key(0), (4, 3)), "bias": F.normal(F.key(1), (3,))}})
GRADS = F.tree_map(lambda leaf: leaf * 0.1 + 0.05, PARAMS)


def run(optimizer: F.Optimizer, steps: int = 5) -> F.Tree:
    params, state = PARAMS, optimizer.init(PARAMS)
    for i in range(steps):
        grads = F.tree_map(lambda leaf, i=i: leaf * (i + 1), GRADS)
        updates, state = optimizer.update(grads, state, params)
        params = F.apply_updates(params, updates)
    return params


def run_torch(make: Any, steps: int = 5) -> list[Tensor]:
    params = [leaf.clone().requires_grad_() for leaf in F.tree_leaves(PARAMS)]
    optimizer = make(params)
    for i in range(steps):
        for param, grad in zip(params, F.tree_leaves(GRADS), strict=True):
            param.grad = grad * (i + 1)
        optimizer.step()
    return params


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (F.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
        (F.sgd(0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
        (F.adam(0.1), lambda p: torch.optim.Adam(p, 0.1)),
        (F.adamw(0.1, weight_decay=0.3), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3)),
        # torch adds eps outside of the root, and optax inside: with none they agree.
        (F.rmsprop(0.1, eps=0.0), lambda p: torch.optim.RMSprop(p, 0.1, 0.9, eps=0.0)),
        (F.adagrad(0.1, eps=0.0), lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1, eps=0.0)),
    ],
)
def test_optimizers_equal_torch(ours: F.Optimizer, theirs: Any) -> None:
    for mine, other in zip(F.tree_leaves(run(ours)), run_torch(theirs), strict=True):
        torch.testing.assert_close(mine, other.detach())


PAIRS: dict[str, Any] = {
    "momentum": lambda o: (F.sgd(0.1, 0.9, nesterov=True), o.sgd(0.1, 0.9, nesterov=True)),
    "adamw": lambda o: (F.adamw(0.1, weight_decay=0.3), o.adamw(0.1, weight_decay=0.3)),
    "lion": lambda o: (F.lion(0.1), o.lion(0.1)),
    "clip": lambda o: (
        F.chain(F.clip_by_global_norm(0.1), F.clip_by_value(0.05), F.sgd(0.1)),
        o.chain(o.clip_by_global_norm(0.1), o.clip(0.05), o.sgd(0.1)),
    ),
    "schedule": lambda o: (
        F.adamw(F.warmup_cosine_schedule(0.1, 2, 5, end=0.01)),
        o.adamw(o.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5, 0.01)),
    ),
    "mask": lambda o: (
        F.adamw(0.1, weight_decay=0.3, mask={"dense": {"kernel": True, "bias": False}}),
        o.adamw(0.1, weight_decay=0.3, mask={"dense": {"kernel": True, "bias": False}}),
    ),
    "labels": lambda o: (
        F.by_label({"a": F.adam(0.1), "b": F.sgd(0.2)}, {"dense": {"kernel": "a", "bias": "b"}}),
        o.multi_transform({"a": o.adam(0.1), "b": o.sgd(0.2)}, {"dense": {"kernel": "a", "bias": "b"}}),
    ),
    "rmsprop": lambda o: (F.rmsprop(0.1), o.rmsprop(0.1)),
    "rmsprop centered": lambda o: (
        F.rmsprop(0.1, centered=True, momentum=0.9, nesterov=True),
        o.rmsprop(0.1, centered=True, momentum=0.9, nesterov=True),
    ),
    "adagrad": lambda o: (F.adagrad(0.1), o.adagrad(0.1)),
    "lamb": lambda o: (F.lamb(0.1, weight_decay=0.1), o.lamb(0.1, weight_decay=0.1)),
    "adafactor": lambda o: (
        F.adafactor(F.linear_schedule(0.1, 0.0, 9), min_dim_size_to_factor=2),
        o.adafactor(o.linear_schedule(0.1, 0.0, 9), min_dim_size_to_factor=2),
    ),
    "adafactor whole": lambda o: (
        F.adafactor(0.1, momentum=0.9, weight_decay_rate=0.01),
        o.adafactor(0.1, momentum=0.9, weight_decay_rate=0.01),
    ),
    "accumulate": lambda o: (F.accumulate(F.adamw(0.1), 2), o.MultiSteps(o.adamw(0.1), 2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_optimizers_equal_optax(name: str) -> None:
    optax = pytest.importorskip("optax")
    jax = pytest.importorskip("jax")
    serialization = pytest.importorskip("flax.serialization")

    ours, theirs = PAIRS[name](optax)
    params, grads = ({"dense": {k: v.numpy() for k, v in one["dense"].items()}} for one in (PARAMS, GRADS))
    state = theirs.init(params)
    for i in range(5):
        updates, state = theirs.update(jax.tree.map(lambda leaf, i=i: leaf * (i + 1), grads), state, params)
        params = optax.apply_updates(params, updates)
    if name.startswith(("rmsprop", "adagrad", "lamb", "adafactor")):
        F.from_bytes(ours.init(PARAMS), serialization.to_bytes(state))  # the same fields, or it is an error
    for path, mine in F.flatten(run(ours)).items():
        other = torch.from_numpy(jax.device_get(params[path[0]][path[1]]).copy())
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=1e-6)


def test_lamb_moves_each_parameter_by_its_norm_and_adafactor_by_its_size() -> None:
    updates, _ = (lamb := F.lamb(0.1)).update(GRADS, lamb.init(PARAMS), PARAMS)
    for path, update in F.flatten(updates).items():
        torch.testing.assert_close(update.norm(), 0.1 * PARAMS.at(path).norm())
    # In its first step Adafactor follows signs; of a rank-1 matrix the factors lose nothing.
    rows, columns = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, -4.0])
    params, grads = F.Tree({"w": torch.ones(3, 2)}), F.Tree({"w": rows[:, None] * columns})
    for factored in (True, False):
        optimizer = F.adafactor(0.1, min_dim_size_to_factor=2, factored=factored)
        state = optimizer.init(params)
        moved, _ = optimizer.update(grads, state, params)
        torch.testing.assert_close(moved["w"], -0.1 * grads["w"].sign())
        held = sum(leaf.numel() for leaf in F.tree_leaves(state))
        assert held == (1 + 3 + 2 + 1 if factored else 1 + 1 + 1 + 6)
    with pytest.raises(TreeStructureError, match="depends on parameters"):
        optimizer.update(grads, state)


def test_updates_go_to_their_namesakes_whatever_the_order() -> None:
    params = {"b": torch.ones(2), "a": torch.zeros(2)}
    grads = {"a": torch.full((2,), 5.0), "b": torch.full((2,), 7.0)}
    optimizer = F.chain(F.Optimizer(lambda _: (), lambda g, s, _: (dict(reversed(list(g.items()))), s)), F.sgd(1.0))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    moved = F.apply_updates(params, updates)
    assert (moved["a"].tolist(), moved["b"].tolist()) == ([-5, -5], [-6, -6])
    updates, _ = optimizer.update(grads, optimizer.init(F.Tree(params)), F.Tree(params))
    assert F.apply_updates(F.Tree(params), updates)["b"].equal(moved["b"])


@pytest.mark.parametrize(
    ("grads", "said"),
    [
        (GRADS.without("dense.bias"), r"'dense\.bias' is not in both"),
        (F.rename(GRADS, [(r"dense\.bias", "dense.bais")]), "is not in both"),
        (GRADS.set("dense.bias", torch.ones(4)), r"'dense\.bias' has the shape \(3,\), its update \(4,\)"),
    ],
)
def test_gradients_of_other_parameters_are_refused(grads: F.Tree, said: str) -> None:
    optimizer = F.adam(0.1)
    with pytest.raises(TreeStructureError, match=said):
        optimizer.update(grads, optimizer.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "optimizer", [F.sgd(0.1, 0.9), F.adam(0.1), F.lion(0.1), F.accumulate(F.sgd(0.1), 2), F.muon(0.1)]
)
def test_wide_gradients_leave_the_state_in_its_dtype(optimizer: F.Optimizer) -> None:
    params = F.tree_map(lambda leaf: leaf.bfloat16(), PARAMS)
    state = optimizer.init(params)
    _, after = optimizer.update(GRADS, state, params)
    assert [leaf.dtype for leaf in F.tree_leaves(after)] == [leaf.dtype for leaf in F.tree_leaves(state)]


def test_groups_of_nothing_and_masks_with_holes() -> None:
    nothing = F.masked(F.clip_by_global_norm(0.1), lambda *_: False)
    assert nothing.update(GRADS, nothing.init(PARAMS))[0] is GRADS
    with pytest.raises(TreeStructureError, match=r"the mask does not cover 'dense\.bias'"):
        run(F.adamw(0.1, mask={"dense": {"kernel": True}}), 1)
    with pytest.raises(UsageError, match="accumulate over 0"):
        F.accumulate(F.sgd(0.1), 0)


def test_update_changes_nothing_that_it_was_given() -> None:
    optimizer = F.chain(F.clip_by_global_norm(1.0), F.adamw(0.1))
    state = optimizer.init(PARAMS)
    before = [leaf.clone() for leaf in F.tree_leaves((PARAMS, GRADS, state))]
    optimizer.update(GRADS, state, PARAMS)
    assert all(a.equal(b) for a, b in zip(before, F.tree_leaves((PARAMS, GRADS, state)), strict=True))


def test_clipping() -> None:
    clip = F.clip_by_global_norm(0.1)
    clipped, _ = clip.update(GRADS, clip.init(PARAMS))
    assert float(F.global_norm(clipped)) == pytest.approx(0.1, rel=1e-4)
    loose = F.clip_by_global_norm(100.0)
    torch.testing.assert_close(loose.update(GRADS, loose.init(PARAMS))[0].at("dense.bias"), GRADS.at("dense.bias"))
    values, _ = F.clip_by_value(0.05).update(GRADS, F.clip_by_value(0.05).init(PARAMS))
    assert max(float(leaf.abs().max()) for leaf in F.tree_leaves(values)) == pytest.approx(0.05)


def test_masks_choose_by_path_and_shape() -> None:
    decayed = run(F.adamw(0.1, weight_decay=0.5, mask=F.not_vectors), 1)
    plain = run(F.adam(0.1), 1)
    assert decayed.at("dense.bias").equal(plain.at("dense.bias"))
    assert not decayed.at("dense.kernel").equal(plain.at("dense.kernel"))
    by_tree = run(F.adamw(0.1, weight_decay=0.5, mask={"dense": {"kernel": True, "bias": False}}), 1)
    assert by_tree.at("dense.kernel").equal(decayed.at("dense.kernel"))
    assert mask_tree(F.not_vectors, PARAMS) == {"dense": {"bias": False, "kernel": True}}
    frozen = run(
        F.by_label(
            {"train": F.sgd(0.1), "freeze": F.scale(0.0)}, lambda path, _: "train" if path[-1] == "bias" else "freeze"
        )
    )
    assert frozen.at("dense.kernel").equal(PARAMS.at("dense.kernel"))
    assert not frozen.at("dense.bias").equal(PARAMS.at("dense.bias"))
    with pytest.raises(TreeStructureError, match="'other'"):
        F.by_label({"train": F.sgd(0.1)}, lambda *_: "other").init(PARAMS)
    with pytest.raises(TreeStructureError, match="updates for"):
        F.apply_updates(PARAMS, PARAMS.without("dense.bias"))


@pytest.mark.parametrize("shape", [(8, 8), (16, 4), (4, 16), (8, 2, 4), (2, 4, 8)])
def test_muon_updates_are_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    update = orthogonal_update(F.normal(F.key(0), shape))
    cut = {(8, 2, 4): (8, 8), (2, 4, 8): (8, 8)}.get(shape, shape)
    scale = max(1.0, cut[1] / cut[0]) ** 0.5
    singular = torch.linalg.svdvals(update.reshape(cut)) / scale
    assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3


def test_muon_trains_matrices_and_leaves_the_rest_to_adamw() -> None:
    assert default_label(("embed", "embedding"), torch.ones(3, 3)) == "adamw"
    assert default_label(("layers_0", "norm", "scale"), torch.ones(3)) == "adamw"
    assert default_label(("layers", "mlp", "kernel"), torch.ones(2, 3, 3), stacked=1) == "muon"
    x = F.normal(F.key(0), (32, 4))
    target = x @ F.normal(F.key(1), (4, 3))
    model = F.Dense(3)
    state = F.TrainState.create(model.apply, model.init(F.key(2), x), F.muon(F.linear_schedule(0.2, 0.0, 60)))
    losses = []
    for _ in range(60):
        value, grads = F.value_and_grad(lambda p: (model.apply({"params": p}, x) - target).square().mean())(
            state.params
        )
        state = state.apply_gradients(grads)
        losses.append(float(value))
    assert losses[-1] < 0.05 * losses[0]


def test_lion_moves_by_the_rate() -> None:
    moved = run(F.lion(0.1, weight_decay=0.0), 1)
    torch.testing.assert_close((moved.at("dense.kernel") - PARAMS.at("dense.kernel")).abs(), torch.full((4, 3), 0.1))


@given(st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=6, deadline=None)
def test_accumulated_steps_equal_one_step_on_the_mean(every: int, rounds: int) -> None:
    inner = F.adam(0.1)
    optimizer = F.accumulate(inner, every)
    params, state = PARAMS, optimizer.init(PARAMS)
    expected, inner_state = PARAMS, inner.init(PARAMS)
    for round_ in range(rounds):
        parts = [F.tree_map(lambda leaf, i=i, r=round_: leaf * (i + r), GRADS) for i in range(every)]
        for part in parts:
            updates, state = optimizer.update(part, state, params)
            params = F.apply_updates(params, updates)
        mean = F.tree_map(lambda *leaves: sum(leaves) / every, *parts)
        updates, inner_state = inner.update(mean, inner_state, expected)
        expected = F.apply_updates(expected, updates)
        for a, b in zip(F.tree_leaves(params), F.tree_leaves(expected), strict=True):
            torch.testing.assert_close(a, b)


def test_microbatches_equal_the_whole_batch() -> None:
    model, x = F.Dense(2), F.normal(F.key(0), (12, 4))
    params = model.init(F.key(0), x)["params"]

    def loss(params: F.Tree, x: Tensor) -> Tensor:
        return model.apply({"params": params}, x).square().mean()

    value, grads = F.value_and_grad(loss)(params, x)
    value3, grads3 = F.microbatched(loss, 3)(params, x)
    torch.testing.assert_close(value3, value)
    torch.testing.assert_close(grads3["kernel"], grads["kernel"])
    with pytest.raises(TransformError, match="does not divide into 5"):
        F.microbatched(loss, 5)(params, x)


def test_schedules() -> None:
    warm = F.warmup_cosine_schedule(1.0, 10, 110, end=0.1)
    found = [float(warm(torch.tensor(step))) for step in (0, 5, 10, 60, 110, 1000)]
    assert found == pytest.approx([0.0, 0.5, 1.0, 0.55, 0.1, 0.1])
    stable = F.warmup_stable_decay_schedule(1.0, 10, 100, 20)
    assert [float(stable(torch.tensor(step))) for step in (5, 10, 79, 90, 100)] == pytest.approx([0.5, 1, 1, 0.5, 0])
    assert float(F.exponential_schedule(1.0, 0.5, 10)(torch.tensor(20))) == pytest.approx(0.25)
    rates = F.scale_by_rate(F.linear_schedule(1.0, 0.0, 2))
    state = rates.init(PARAMS)
    factors = []
    for _ in range(3):
        moved, state = rates.update(F.tree_map(torch.ones_like, PARAMS), state)
        factors.append(-float(moved.at("dense.bias")[0]))
    assert factors == pytest.approx([1.0, 0.5, 0.0])


def test_train_state_carries_other_collections() -> None:
    model, x = F.BatchNorm(), F.normal(F.key(0), (16, 3)) + 2
    state = F.TrainState.create(model.apply, model.init(F.key(0), x, use_running_average=True), F.sgd(0.1))

    def loss(params: F.Tree) -> tuple[Tensor, F.Tree]:
        out, updated = state.apply(params, x, use_running_average=False, mutable=["batch_stats"])
        return out.square().mean(), updated

    (_, updated), grads = F.value_and_grad(loss, has_aux=True)(state.params)
    after = state.apply_gradients(grads, collections=state.collections.merge(updated))
    assert int(after.step) == 1
    assert int(state.step) == 0
    torch.testing.assert_close(after.collections.at("batch_stats.mean"), 0.01 * x.mean(0))
    assert state.collections.at("batch_stats.mean").abs().max() == 0
    with pytest.raises(TransformError, match="'params'"):
        F.TrainState.create(model.apply, {}, F.sgd(0.1))


def test_dynamic_scale_backs_off_and_grows() -> None:
    scale = F.DynamicScale.create(1024.0, interval=2)

    def loss(params: dict[str, Tensor], factor: Tensor) -> Tensor:
        return (params["w"] * factor).sum()

    params = {"w": torch.ones(3)}
    new, is_finite, value, grads = scale.value_and_grad(loss)(params, torch.tensor(2.0))
    assert is_finite
    assert float(value) == 6.0
    torch.testing.assert_close(grads["w"], torch.full((3,), 2.0))
    new = new.value_and_grad(loss)(params, torch.tensor(2.0))[0]
    assert float(new.scale) == 1024.0  # two finite steps so far: the next one grows, as in flax
    grown = new.value_and_grad(loss)(params, torch.tensor(2.0))[0]
    assert float(grown.scale) == 2048.0
    broken, is_finite, _, bad = grown.value_and_grad(loss)(params, torch.tensor(float("inf")))
    assert not is_finite
    assert float(broken.scale) == 1024.0
    kept = F.select(is_finite, {"w": params["w"] - bad["w"]}, params)
    assert kept["w"].equal(params["w"])


def test_ema_is_debiased() -> None:
    ema = F.EMA.create({"w": torch.zeros(2)}, decay=0.9)
    for value in (1.0, 1.0, 1.0):
        ema = ema.update({"w": torch.full((2,), value)})
    torch.testing.assert_close(ema.debiased()["w"], torch.ones(2))
    torch.testing.assert_close(ema.average["w"], torch.full((2,), 1 - 0.9**3))


def test_ema_of_sixteen_bits_does_not_stop_short() -> None:
    ema = F.EMA.create({"w": torch.zeros(2, dtype=torch.bfloat16)}, decay=0.99)
    for _ in range(300):
        ema = ema.update({"w": torch.ones(2, dtype=torch.bfloat16)})
    torch.testing.assert_close(ema.average["w"], torch.full((2,), 1 - 0.99**300))
    with pytest.raises(TreeStructureError, match="'b' is not in both"):
        ema.update({"w": torch.ones(2), "b": torch.ones(2)})


def test_a_subclass_of_a_state_is_a_tree_with_its_own_fields() -> None:
    class Averaged(F.TrainState):
        average: F.EMA
        note: str = F.static(default="")

    model, x = F.Dense(2), torch.ones(3, 4)
    variables = model.init(F.key(0), x)
    state = Averaged.create(
        model.apply, variables, F.adamw(0.1), average=F.EMA.create(variables["params"]), note="kept"
    )

    def step(state: Averaged) -> Averaged:
        grads = F.grad(lambda params: state.apply(params, x).square().mean())(state.params)
        state = state.apply_gradients(grads)
        return F.replace(state, average=state.average.update(state.params))

    other = F.from_bytes(state, F.to_bytes(step(state)))
    plain, restored = step(step(state)), F.jit(step, backend="eager")(other)
    assert (type(restored), restored.note) == (Averaged, "kept")
    for a, b in zip(F.tree_leaves(plain), F.tree_leaves(restored), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(FunctionalError, match=r"frozen: cannot assign its field 'step'.*replace\(value, step="):
        state.step = 3  # type: ignore[misc, assignment]


def test_metrics_of_nothing_and_of_other_names() -> None:
    none, some = F.Welford.from_batch(torch.ones(0)), F.Welford.from_batch(torch.tensor([1.0, 3.0]))
    for merged in (none.merge(some), some.merge(none)):
        assert float(merged.compute()["mean"]) == 2.0
        assert float(merged.compute()["std"]) == 1.0
    one = F.Metrics.from_batch(loss=F.Average.from_batch(torch.ones(1)))
    with pytest.raises(TreeStructureError, match="metrics loss with metrics acc"):
        one.merge(F.Metrics.from_batch(acc=F.Average.from_batch(torch.ones(1))))
    with pytest.raises(UsageError, match="no metrics to merge"):
        F.merge_all([])


def test_early_stopping() -> None:
    state, improved = F.EarlyStopping(patience=2, min_delta=0.1), []
    for metric in (1.0, 0.95, 0.8, 0.79, 0.78, 0.77, 0.76):
        has_improved, state = state.update(metric)
        improved.append(has_improved)
        if state.should_stop:
            break
    assert improved == [True, False, True, False, False, False]
    assert state.best == 0.8


@given(st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=2, max_size=5), st.randoms())
@settings(deadline=None)
def test_metrics_merge_in_any_order(batches: list[list[float]], random: Any) -> None:
    tensors = [torch.tensor(one) for one in batches]
    everything = torch.cat(tensors).double()
    random.shuffle(tensors)
    metric = F.merge_all(
        F.Metrics.from_batch(mean=F.Average.from_batch(one), spread=F.Welford.from_batch(one)) for one in tensors
    )
    found = metric.compute()
    assert float(found["mean"]) == pytest.approx(float(everything.mean()), abs=1e-3)
    assert float(found["spread"]["mean"]) == pytest.approx(float(everything.mean()), abs=1e-3)
    assert float(found["spread"]["std"]) == pytest.approx(float(everything.std(correction=0)), abs=2e-3)


def test_accuracy_with_a_mask() -> None:
    logits, labels = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), torch.tensor([1, 1, 0])
    one = F.Accuracy.from_batch(logits, labels, mask=torch.tensor([1, 1, 0]))
    assert float(one.compute()) == 0.5
    assert float(one.merge(F.Accuracy.from_batch(logits, labels)).compute()) == pytest.approx(3 / 5)
