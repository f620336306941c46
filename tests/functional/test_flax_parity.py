"""Layer by layer against flax with the same parameters, and one train step against optax: to 1e-5 in fp32."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

import piledriver.functional as F
from piledriver.functional.random.keys import key

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

jax = pytest.importorskip("jax")
nn = pytest.importorskip("flax.linen")
optax = pytest.importorskip("optax")
jnp = jax.numpy


@pytest.fixture(autouse=True)
def _full_precision() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


def as_jax(tree: Any) -> Any:
    return F.tree_map(lambda leaf: jnp.asarray(leaf.numpy()), F.Tree(tree)).to_dict()


def close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(ours.detach().numpy(), np.asarray(theirs), atol=tolerance, rtol=tolerance)


def randomised(variables: F.Tree, seed: int = 7) -> F.Tree:
    """No zeros or ones left, so that every parameter matters."""
    return F.map_with_path(
        lambda path, leaf: (
            leaf + 0.1 * F.normal(F.fold_in(key(seed), ".".join(path)), leaf.shape)
            if leaf.is_floating_point()
            else leaf
        ),
        variables,
    )


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return F.normal(key(seed), shape)


LAYERS = {
    "dense": (F.Dense(5), nn.Dense(5), (draw(2, 3, 4),)),
    "dense without bias": (F.Dense(5, use_bias=False), nn.Dense(5, use_bias=False), (draw(2, 4),)),
    "dense general": (F.DenseGeneral((2, 3), (1, 2)), nn.DenseGeneral((2, 3), axis=(1, 2)), (draw(2, 4, 5, 6),)),
    "dense general, inner dim": (F.DenseGeneral(3, 1), nn.DenseGeneral(3, axis=1), (draw(2, 4, 5),)),
    "einsum": (
        F.Einsum((4, 3, 5), "abc,cde->abde"),
        nn.Einsum((4, 3, 5), "abc,cde->abde", use_bias=False),
        (draw(2, 3, 4),),
    ),
    "conv 1d": (F.Conv(5, (3,)), nn.Conv(5, (3,)), (draw(2, 7, 4),)),
    "conv 2d strided": (F.Conv(6, (3, 3), 2), nn.Conv(6, (3, 3), 2), (draw(2, 7, 8, 4),)),
    "conv even window": (F.Conv(6, (4, 2)), nn.Conv(6, (4, 2)), (draw(2, 7, 8, 4),)),
    "conv dilated": (F.Conv(6, (3, 3), dilation=2), nn.Conv(6, (3, 3), kernel_dilation=2), (draw(1, 9, 8, 4),)),
    "conv grouped": (F.Conv(6, (3,), groups=2), nn.Conv(6, (3,), feature_group_count=2), (draw(2, 7, 4),)),
    "conv valid": (F.Conv(6, (3, 3), padding="VALID"), nn.Conv(6, (3, 3), padding="VALID"), (draw(1, 9, 8, 4),)),
    "conv circular": (F.Conv(6, (3,), padding="CIRCULAR"), nn.Conv(6, (3,), padding="CIRCULAR"), (draw(1, 9, 4),)),
    "conv causal": (F.Conv(6, (3,), padding="CAUSAL"), nn.Conv(6, (3,), padding="CAUSAL"), (draw(1, 9, 4),)),
    "conv transpose": (F.ConvTranspose(6, (3, 3), 2), nn.ConvTranspose(6, (3, 3), (2, 2)), (draw(1, 5, 4, 3),)),
    "conv transpose stride 1": (F.ConvTranspose(6, (4,)), nn.ConvTranspose(6, (4,)), (draw(1, 5, 3),)),
    "conv transpose valid": (
        F.ConvTranspose(6, (3,), 2, "VALID"),
        nn.ConvTranspose(6, (3,), (2,), "VALID"),
        (draw(1, 5, 3),),
    ),
    "conv transpose wide stride": (F.ConvTranspose(6, (2,), 3), nn.ConvTranspose(6, (2,), (3,)), (draw(1, 5, 3),)),
    "conv circular, strided": (
        F.Conv(6, (3,), 3, "CIRCULAR", 2),
        nn.Conv(6, (3,), 3, "CIRCULAR", kernel_dilation=2),
        (draw(1, 9, 4),),
    ),
    "conv circular, many times round": (
        F.Conv(6, (7,), padding="CIRCULAR"),
        nn.Conv(6, (7,), padding="CIRCULAR"),
        (draw(1, 2, 4),),
    ),
    "conv reflected": (
        F.Conv(6, (4, 3), 2, "REFLECT"),
        nn.Conv(6, (4, 3), 2, "REFLECT"),
        (draw(2, 7, 2, 4),),
    ),
    "conv numbers": (F.Conv(6, (3, 3), padding=(1, 2)), nn.Conv(6, (3, 3), padding=(1, 2)), (draw(1, 5, 4, 3),)),
    "conv one number, no batch": (F.Conv(6, 3), nn.Conv(6, 3), (draw(7, 4),)),
    "conv two batch dims": (F.Conv(6, (3,)), nn.Conv(6, (3,)), (draw(2, 3, 7, 4),)),
    "conv transpose, no batch": (F.ConvTranspose(6, 3, 2), nn.ConvTranspose(6, (3,), (2,)), (draw(4, 3),)),
    "dense general, any order": (F.DenseGeneral(3, (2, 1)), nn.DenseGeneral(3, axis=(2, 1)), (draw(2, 4, 5),)),
    "embed": (F.Embed(11, 4), nn.Embed(11, 4), (torch.tensor([[1, 2], [10, 0]]),)),
    "embed of bytes": (F.Embed(11, 4), nn.Embed(11, 4), (torch.tensor([1, 10], dtype=torch.uint8),)),
    "layer norm": (F.LayerNorm(), nn.LayerNorm(), (draw(2, 3, 8),)),
    "rms norm": (F.RMSNorm(), nn.RMSNorm(), (draw(2, 3, 8),)),
    "group norm": (F.GroupNorm(4), nn.GroupNorm(4), (draw(2, 3, 5, 8),)),
    "group norm by size": (F.GroupNorm(group_size=2), nn.GroupNorm(None, group_size=2), (draw(2, 3, 8),)),
    "instance norm": (F.GroupNorm(group_size=1), nn.GroupNorm(None, group_size=1), (draw(1, 5, 4),)),
    "rnn lstm": (F.RNN(F.LSTMCell(5)), nn.RNN(nn.OptimizedLSTMCell(5)), (draw(2, 6, 3),)),
    "rnn gru": (F.RNN(F.GRUCell(5)), nn.RNN(nn.GRUCell(5)), (draw(2, 6, 3),)),
    "rnn simple": (F.RNN(F.SimpleCell(5)), nn.RNN(nn.SimpleCell(5)), (draw(2, 6, 3),)),
    "rnn residual": (F.RNN(F.SimpleCell(3, residual=True)), nn.RNN(nn.SimpleCell(3, residual=True)), (draw(2, 6, 3),)),
    "rnn conv lstm": (F.RNN(F.ConvLSTMCell(2, (3,))), nn.RNN(nn.ConvLSTMCell(2, (3,))), (draw(2, 3, 5, 2),)),
    "prelu": (F.PReLU(), nn.PReLU(), (draw(2, 3),)),
    "sequential": (
        F.Sequential([F.Dense(5), torch.tanh, F.Dense(2)]),
        nn.Sequential([nn.Dense(5), jnp.tanh, nn.Dense(2)]),
        (draw(2, 3),),
    ),
    "rnn lstm, empty batch": (F.RNN(F.LSTMCell(5)), nn.RNN(nn.OptimizedLSTMCell(5)), (draw(0, 6, 3),)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_flax(name: str) -> None:
    ours, theirs, args = LAYERS[name]
    variables = randomised(ours.init(key(1), *args))
    inputs = [jnp.asarray(arg.numpy()) for arg in args]
    expected_tree = jax.tree_util.tree_map(lambda leaf: leaf.shape, theirs.init(jax.random.key(0), *inputs))
    assert F.tree_map(lambda leaf: tuple(leaf.shape), variables).to_dict() == expected_tree
    close(ours.apply(variables, *args), theirs.apply(as_jax(variables), *inputs))


class Wrapped(nn.Module):
    """A wrapper of flax around a layer named as ours names it; flax keeps the layer beside the wrapper."""

    wrapper: Any

    @nn.compact
    def __call__(self, x: Any, **kwargs: Any) -> Any:
        return self.wrapper(nn.Conv(5, (3,), name="layer"), name="wrapper")(x, **kwargs)


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (F.WeightNorm(F.Conv(5, 3)), nn.WeightNorm, {}),
        (F.WeightNorm(F.Conv(5, 3), names=None, feature_dims=None), None, {}),
        (F.SpectralNorm(F.Conv(5, 3), 2), functools.partial(nn.SpectralNorm, n_steps=2), {"update_stats": True}),
    ],
)
def test_normalised_weights_equal_flax(ours: F.Module, theirs: Any, options: Any) -> None:
    x = draw(2, 6, 4)
    if theirs is None:
        theirs = functools.partial(nn.WeightNorm, variable_filter=None, feature_axes=None)
    variables = randomised(ours.init(key(0), x, **options))
    tree = as_jax(variables)
    layer = tree["params"].pop("layer")
    given = {"params": {"layer": layer, "wrapper": tree["params"]}}
    given |= {name: {"wrapper": below} for name, below in tree.items() if name != "params"}
    out, updated = ours.apply(variables, x, mutable=["batch_stats"], **options)
    their_out, their_updated = Wrapped(theirs).apply(given, jnp.asarray(x.numpy()), mutable=["batch_stats"], **options)
    close(out, their_out)
    for name, value in updated.get("batch_stats", {}).items():
        close(value, their_updated["batch_stats"]["wrapper"][name])


def test_repeated_draws_are_new_in_flax_too() -> None:
    """The law of `test_layers.test_every_application_draws_anew`, stated by flax."""

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            block = nn.Sequential([nn.Dropout(0.5, deterministic=False)])
            return block(x), block(x)

    first, second = Twice().apply({}, jnp.ones(64), rngs={"dropout": jax.random.key(0)})
    assert not (first == second).all()


def test_embed_attend_equals_flax() -> None:
    ours, theirs, query = F.Embed(11, 4), nn.Embed(11, 4), draw(3, 4)
    variables = ours.init(key(0), torch.tensor([1]))
    close(
        ours.apply(variables, query, method="attend"),
        theirs.apply(as_jax(variables), jnp.asarray(query.numpy()), method="attend"),
    )


@pytest.mark.parametrize("shape", [(6, 4), (3, 5, 4), (2, 3, 3, 4)])
def test_batch_norm_equals_flax_in_both_modes(shape: tuple[int, ...]) -> None:
    x = draw(*shape)
    ours, theirs = F.BatchNorm(momentum=0.9), nn.BatchNorm(momentum=0.9)
    variables = randomised(ours.init(key(0), x, use_running_average=True))
    variables = variables.set("batch_stats.var", variables.at("batch_stats.var").abs())
    their_variables, their_x = as_jax(variables), jnp.asarray(x.numpy())
    close(
        ours.apply(variables, x, use_running_average=True),
        theirs.apply(their_variables, their_x, use_running_average=True),
    )
    out, updated = ours.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
    their_out, their_updated = theirs.apply(
        their_variables, their_x, use_running_average=False, mutable=["batch_stats"]
    )
    close(out, their_out)
    for name in ("mean", "var"):
        close(updated["batch_stats"][name], their_updated["batch_stats"][name])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cells", [(F.LSTMCell(5), nn.OptimizedLSTMCell(5)), (F.GRUCell(5), nn.GRUCell(5))])
def test_sequences_with_lengths_equal_flax(cells: Any, reverse: bool) -> None:
    x, lengths = draw(3, 6, 4), torch.tensor([6, 1, 4])
    ours = F.RNN(cells[0], reverse, return_carry=True)
    theirs = nn.RNN(cells[1], reverse=reverse, keep_order=True, return_carry=True)
    variables = randomised(ours.init(key(0), x))
    carry, out = ours.apply(variables, x, lengths=lengths)
    their_carry, their_out = theirs.apply(
        as_jax(variables), jnp.asarray(x.numpy()), seq_lengths=jnp.asarray(lengths.numpy())
    )
    for mine, other in zip(F.tree_leaves(carry), jax.tree_util.tree_leaves(their_carry), strict=True):
        close(mine, other)
    for i, length in enumerate(lengths):
        close(out[i, :length], their_out[i, :length])
        assert not out[i, length:].any()


@pytest.mark.parametrize("masking", ["none", "causal", "padding", "both"])
@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_attention_equals_flax(masking: str, implementation: Any) -> None:
    x = draw(2, 5, 12)
    ours = F.MultiHeadAttention(3, implementation=implementation)
    theirs = nn.MultiHeadDotProductAttention(3)
    masks = []
    if masking in ("causal", "both"):
        masks.append(F.causal_mask(5, 5)[None, None])
    if masking in ("padding", "both"):
        masks.append(F.padding_mask(torch.tensor([5, 3]), 5))
    mask = F.combine_masks(*masks)
    variables = randomised(ours.init(key(0), x))
    their_mask = None if mask is None else jnp.asarray(mask.numpy())
    their_x = jnp.asarray(x.numpy())
    close(ours.apply(variables, x, mask=mask), theirs.apply(as_jax(variables), their_x, mask=their_mask))


def test_pooling_equals_flax() -> None:
    x = draw(2, 7, 8, 3)
    their_x = jnp.asarray(x.numpy())
    for padding in ("VALID", "SAME"):
        close(F.max_pool(x, (3, 2), 2, padding), nn.max_pool(their_x, (3, 2), (2, 2), padding))
        close(F.avg_pool(x, (3, 2), 2, padding), nn.avg_pool(their_x, (3, 2), (2, 2), padding))
        close(
            F.avg_pool(x, (3, 2), 2, padding, count_include_pad=False),
            nn.avg_pool(their_x, (3, 2), (2, 2), padding, count_include_pad=False),
        )
    close(F.max_pool(x[0], (3, 2), 2, ((1, 0), (0, 1))), nn.max_pool(their_x[0], (3, 2), (2, 2), ((1, 0), (0, 1))))
    close(F.max_pool(x[0], 3, 2), nn.max_pool(their_x[0], (3,), (2,)))


class OurNet(F.Module):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.child("first", F.Dense(16))(x))
        x = self.child("norm", F.LayerNorm())(x)
        return self.child("second", F.Dense(3))(x)


class TheirNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(nn.Dense(16, name="first")(x))
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(3, name="second")(x)


OPTIMIZERS = {
    "adamw": (F.adamw(1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)),
    "adamw, clipped, scheduled": (
        F.chain(F.clip_by_global_norm(0.1), F.adamw(F.warmup_cosine_schedule(1e-2, 2, 10), weight_decay=0.1)),
        optax.chain(
            optax.clip_by_global_norm(0.1),
            optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), weight_decay=0.1),
        ),
    ),
    "adam": (F.adam(1e-2), optax.adam(1e-2)),
    "sgd momentum": (F.sgd(1e-2, 0.9, nesterov=True), optax.sgd(1e-2, 0.9, nesterov=True)),
    "lion": (F.lion(1e-2), optax.lion(1e-2)),
    "accumulated": (F.accumulate(F.adam(1e-2), 2), optax.MultiSteps(optax.adam(1e-2), 2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_train_steps_equal_flax_and_optax(name: str) -> None:
    optimizer, their_optimizer = OPTIMIZERS[name]
    x, y = draw(8, 4), draw(8, 3, seed=1)
    model = OurNet()
    state = F.TrainState.create(model.apply, model.init(key(0), x), optimizer)
    params = as_jax(state.params)
    their_state = their_optimizer.init(params)
    their_x, their_y = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())

    def our_loss(params: Any) -> torch.Tensor:
        return (model.apply({"params": params}, x) - y).square().mean()

    def their_loss(params: Any) -> Any:
        return ((TheirNet().apply({"params": params}, their_x) - their_y) ** 2).mean()

    for _ in range(4):
        loss, grads = F.value_and_grad(our_loss)(state.params)
        state = state.apply_gradients(grads)
        their_value, their_grads = jax.value_and_grad(their_loss)(params)
        updates, their_state = their_optimizer.update(their_grads, their_state, params)
        params = optax.apply_updates(params, updates)
        close(loss, their_value)
    for path, leaf in F.flatten(state.params).items():
        close(leaf, F.Tree(params).at(path))
