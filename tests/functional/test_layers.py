"""Layers against torch's own modules, and what each promises: caches, masks, keys, adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as torch_fn

import piledriver.functional as F
from piledriver.core.errors import UsageError
from piledriver.functional.errors import InputShapeError, MissingCollectionError, TransformError
from piledriver.functional.initialisers import (
    constant,
    glorot_normal,
    glorot_uniform,
    he_normal,
    he_uniform,
    lecun_normal,
    lecun_uniform,
    orthogonal,
    scaled_normal,
    scaled_truncated_normal,
    scaled_uniform,
    variance_scaling,
)
from piledriver.kernels.attention import alibi_slopes


def small(**changes: Any) -> F.Decoder:
    fields = {"vocab_size": 31, "dim": 16, "depth": 2, "heads": 4, "kv_heads": 2, "mlp_dim": 24, **changes}
    return F.Decoder(**fields)


TOKENS = F.randint(F.key(9), (2, 7), 0, 31)


class TorchBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(16, 1e-5), nn.RMSNorm(16, 1e-5)
        self.query, self.out = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.key, self.value = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.attention_norm(x)
        query = self.query(y).view(batch, length, 4, 4).transpose(1, 2)
        key, value = (layer(y).view(batch, length, 2, 4).transpose(1, 2) for layer in (self.key, self.value))
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, 4, 2) / 4)
        turn = torch.polar(torch.ones_like(angles), angles)

        def rotated(z: Tensor) -> Tensor:
            first, second = z.chunk(2, dim=-1)
            turned = torch.complex(first, second) * turn
            return torch.cat([turned.real, turned.imag], dim=-1)

        scores = rotated(query) @ rotated(key).repeat_interleave(2, dim=1).transpose(-1, -2) / 2
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        mixed = scores.softmax(-1) @ value.repeat_interleave(2, dim=1)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(torch_fn.silu(self.gate(y)) * self.up(y))


class TorchDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(31, 16), nn.RMSNorm(16, 1e-5)
        self.layers = nn.ModuleList(TorchBlock() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch_fn.linear(self.norm(x), self.embed.weight)


def test_decoder_equals_a_plain_torch_one_with_its_weights() -> None:
    torch.manual_seed(0)
    reference = TorchDecoder()
    weights = F.unflatten(dict(reference.state_dict()))
    rules = [
        (r"layers\.(\d+)\.(query|key|value|out)\.weight", r"layers_\1.attention.\2.kernel"),
        (r"layers\.(\d+)\.(gate|up|down)\.weight", r"layers_\1.mlp.\2.kernel"),
        (r"layers\.(\d+)\.(\w+_norm)\.weight", r"layers_\1.\2.scale"),
        (r"^norm\.weight", "norm.scale"),
        (r"embed\.weight", "embed.embedding"),
    ]
    model = small()
    target = model.init(F.key(0), TOKENS)["params"]
    params, report = F.transfer(weights, target, rules, adapt={r"kernel$": lambda value: value.T})
    assert report.is_complete
    assert not report.left_over
    torch.testing.assert_close(model.apply({"params": params}, TOKENS), reference(TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{"implementation": "reference"}, {"fuse_projections": True}, {"remat": True}])
def test_decoder_variants_compute_the_same(changes: dict[str, Any]) -> None:
    variables = small().init(F.key(0), TOKENS)
    assert list(F.flatten(small(**changes).init(F.key(0), TOKENS))) == list(F.flatten(variables))
    torch.testing.assert_close(small(**changes).apply(variables, TOKENS), small().apply(variables, TOKENS))


def test_scanned_decoder_equals_the_unrolled_one() -> None:
    params = small().init(F.key(0), TOKENS)["params"]
    layers = [params[f"layers_{i}"] for i in range(2)]
    others = {name: value for name, value in params.items() if not name.startswith("layers_")}
    stacked = F.Tree({**others, "layers": F.tree_map(lambda *parts: torch.stack(parts), *layers)})
    for remat in (False, True):
        scanned = small(scan=True, remat=remat)
        shapes = F.tree_map(lambda leaf: leaf.shape, scanned.init(F.key(0), TOKENS)["params"])
        assert shapes == F.tree_map(lambda leaf: leaf.shape, stacked)
        torch.testing.assert_close(
            scanned.apply({"params": stacked}, TOKENS), small().apply({"params": params}, TOKENS)
        )


def test_scanned_layers_start_differently() -> None:
    kernel = small(scan=True).init(F.key(0), TOKENS).at("params.layers.mlp.gate.kernel")
    assert not kernel[0].equal(kernel[1])


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("prompt", [1, 4])
def test_decoding_token_by_token_equals_the_whole_sequence(scan: bool, prompt: int) -> None:
    whole, decoder = small(scan=scan), small(scan=scan, decode=True, max_length=8)
    variables = decoder.init(F.key(0), TOKENS[:, :1])
    expected = whole.apply({"params": variables["params"]}, TOKENS)
    found = []
    for part in (TOKENS[:, :prompt], *TOKENS[:, prompt:].split(1, dim=1)):
        logits, updated = decoder.apply(variables, part, mutable=["cache"])
        variables = variables.merge(updated)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, dim=1), expected)


@given(st.sampled_from([(4, 4), (4, 2), (4, 1)]), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=15, deadline=None)
def test_fused_and_reference_attention_agree(heads: tuple[int, int], causal: bool, padded: bool, biased: bool) -> None:
    query = F.normal(F.key(0), (2, 5, heads[0], 8))
    key, value = F.normal(F.key(1), (2, 6, heads[1], 8)), F.normal(F.key(2), (2, 6, heads[1], 8))
    # The first example may look nowhere.
    mask = F.padding_mask(torch.tensor([0, 4]), 6) if padded else None
    bias = F.alibi_bias(heads[0], torch.arange(5), torch.arange(6)) if biased else None
    settings_ = {"mask": mask, "bias": bias, "causal": causal}
    fused = F.dot_product_attention(query, key, value, **settings_, implementation="fused")
    plain = F.dot_product_attention(query, key, value, **settings_, implementation="reference")
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    if padded:
        assert plain[0].abs().max() == 0


def test_attention_shapes_are_checked() -> None:
    with pytest.raises(InputShapeError, match="multiple of key heads"):
        F.dot_product_attention(torch.ones(1, 2, 4, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))
    with pytest.raises(InputShapeError, match=r"\(root\): 10 features do not divide into 4 heads"):
        F.MultiHeadAttention(4).init(F.key(0), torch.ones(1, 2, 10))

    layer, x = F.MultiHeadAttention(2), torch.ones(3, 5, 8)
    variables = layer.init(F.key(0), x)
    with pytest.raises(InputShapeError, match=r"one example is x\[None\]"):
        layer.apply(variables, x[0])
    with pytest.raises(InputShapeError, match=r"mask of torch.float32. Fix: pass booleans"):
        layer.apply(variables, x, mask=torch.ones(5, 5))
    with pytest.raises(InputShapeError, match=r"\(root\): an attention mask of shape \(3, 5\) for \(3, 2, 5, 5\)"):
        layer.apply(variables, x, mask=torch.ones(3, 5, dtype=torch.bool))
    with pytest.raises(InputShapeError, match="4 rotary positions for 5 queries"):
        layer.clone(rotary_base=1e4).apply(variables, x, positions=torch.arange(4))


def test_attention_in_double_precision_is_that() -> None:
    query = F.normal(F.key(0), (2, 5, 2, 8), torch.float64)
    fused = F.dot_product_attention(query, query, query, implementation="fused")
    plain = F.dot_product_attention(query, query, query, implementation="reference")
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)
    cos, sin = (table.double() for table in F.rotary_tables(torch.zeros(5), 8))
    assert F.rotate_heads(query, cos, sin).equal(query)


def test_a_full_cache_and_another_batch_are_errors_that_teach() -> None:
    layer, x = F.MultiHeadAttention(2, decode=True, max_length=3), torch.ones(2, 1, 8)
    variables = layer.init(F.key(0), x)
    for _ in range(3):
        _, updated = layer.apply(variables, x, mutable=["cache"])
        variables = variables.merge(updated)
    with pytest.raises(InputShapeError, match="1 more tokens after 3 do not fit in a cache of max_length=3"):
        layer.apply(variables, x, mutable=["cache"])
    with pytest.raises(InputShapeError, match=r"a cache of torch.float32 \(2, 3, 2, 4\) for keys"):
        layer.apply(variables, x[:1], mutable=["cache"])


def test_cross_attention_and_attention_dropout() -> None:
    layer = F.MultiHeadAttention(2, dropout_rate=0.5)
    x, context = torch.ones(1, 3, 8), F.normal(F.key(0), (1, 5, 8))
    variables = layer.init(F.key(0), x, context)
    assert layer.apply(variables, x, context).shape == (1, 3, 8)
    rngs = {"dropout": F.key(1)}
    dropped = layer.apply(variables, x, context, deterministic=False, rngs=rngs)
    assert dropped.equal(layer.apply(variables, x, context, deterministic=False, rngs=rngs))
    assert not dropped.equal(layer.apply(variables, x, context))


def test_small_layers_by_their_formulas() -> None:
    x = F.normal(F.key(0), (3, 4))
    prelu = F.PReLU(negative_slope_init=0.25)
    assert prelu.apply(prelu.init(F.key(0), x), x).equal(torch.where(x >= 0, x, 0.25 * x))
    pair = F.Sequential([lambda x: (x, 2 * x), lambda a, b: {"a": a, "b": b}, lambda b, a: a + b])
    assert pair.apply({}, x).equal(3 * x)
    with pytest.raises(TransformError, match="without layers"):
        F.Sequential([]).init(F.key(0), x)
    normed = F.WeightNorm(F.Dense(5))
    variables = normed.init(F.key(0), x)
    kernel = variables.at("params.layer.kernel")
    assert variables["params"]["layer/kernel/scale"].shape == (5,)
    torch.testing.assert_close(normed.apply(variables, x), x @ (kernel / kernel.norm(dim=0)))
    spectral = F.SpectralNorm(F.Dense(5), steps=50)
    variables = spectral.init(F.key(0), x, update_stats=True)
    kernel = variables.at("params.layer.kernel")
    out, updated = spectral.apply(variables, x, update_stats=True, mutable=["batch_stats"])
    torch.testing.assert_close(out, x @ kernel / torch.linalg.matrix_norm(kernel, 2), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(updated["batch_stats"]["layer/kernel/sigma"], torch.linalg.matrix_norm(kernel, 2))
    with pytest.raises(MissingCollectionError, match="batch_stats"):
        spectral.apply({"params": variables["params"]}, x, update_stats=False)
    cell = F.ConvLSTMCell(2, (3, 3))
    images = F.normal(F.key(1), (2, 4, 5, 6, 1))
    rnn = F.RNN(cell, return_carry=True)
    (_, hidden), out = rnn.apply(rnn.init(F.key(0), images), images)
    assert out.shape == (2, 4, 5, 6, 2)
    assert out[:, -1].equal(hidden)


class Small(F.Module):
    """The small layers, made inside a call as a compiler meets them."""

    def __call__(self, x: Tensor) -> Tensor:
        x = self.child("row", F.Sequential([F.Dense(5), torch.tanh, F.Dense(4)]))(x)
        x = self.child("weight", F.WeightNorm(F.Dense(4)))(self.child("slope", F.PReLU())(x))
        x = self.child("spectral", F.SpectralNorm(F.Dense(4)))(x, update_stats=False)
        return self.child("recurrent", F.RNN(F.SimpleCell(3)))(x)


def test_small_layers_compile() -> None:
    x = F.normal(F.key(0), (2, 3, 4))
    variables = Small().init(F.key(1), x)
    compiled = F.jit(lambda variables, x: Small().apply(variables, x), backend="eager")
    torch.testing.assert_close(compiled(variables, x), Small().apply(variables, x))


class Drop(F.Module):
    """A block with a dropout below it."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.child("inner", F.Dropout(0.5, deterministic=False))(x)


class Carried(F.Module):
    """The same block as a cell."""

    def __call__(self, carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return carry, self.child("drop", Drop())(x)

    def initial_carry(self, batch: tuple[int, ...], like: Tensor) -> Tensor:
        return like


@pytest.mark.parametrize(
    "wrap", [lambda m: m, lambda m: F.Remat(m), lambda m: F.Scanned(m, 1), lambda m: F.Vmapped(m, 1)]
)
def test_every_application_draws_anew(wrap: Any) -> None:
    """A block that is applied three times has three masks, and each is a function of the key; so has every step."""

    class Thrice(F.Module):
        def __call__(self, x: Tensor) -> list[Tensor]:
            block = self.child("block", wrap(Drop()))
            return [block(x) for _ in range(3)]

    x, rngs = torch.ones(1, 64), {"dropout": F.key(0)}
    masks = Thrice().apply({"params": {}}, x, rngs=rngs)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 3
    again = Thrice().apply({"params": {}}, x, rngs=rngs)
    compiled = F.jit(lambda x, key: Thrice().apply({"params": {}}, x, rngs={"dropout": key}), backend="eager")
    for first, second, third in zip(masks, again, compiled(x, F.key(0)), strict=True):
        assert first.equal(second)
        assert first.equal(third)
    steps = F.RNN(Carried()).apply({"params": {}}, x.expand(1, 5, 64), rngs=rngs)[0]
    assert len({tuple(mask.tolist()) for mask in steps}) == 5


def test_recomputed_draws_are_those_of_the_forward_pass() -> None:
    class Shared(F.Module):
        def __call__(self, x: Tensor) -> Tensor:
            block = self.child("block", F.Remat(Drop()))
            return block(block(x) + 1.0)

    x, rngs = torch.ones(64), {"dropout": F.key(0)}
    out = Shared().apply({"params": {}}, x, rngs=rngs)
    grad = F.grad(lambda x: Shared().apply({"params": {}}, x, rngs=rngs).sum())(x)
    assert (grad[out == 2.0] == 0).all()  # dropped once, kept once
    assert set(grad.tolist()) == {0.0, 4.0}


def test_dropout_is_a_function_of_key_and_position() -> None:
    layer, x = F.Dropout(0.25), torch.ones(100, 100)
    rngs = {"dropout": F.key(0)}
    out = layer.apply({}, x, deterministic=False, rngs=rngs)
    assert out.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert abs(float((out == 0).float().mean()) - 0.25) < 0.02
    assert out.equal(layer.apply({}, x, deterministic=False, rngs=rngs))
    assert layer.apply({}, x, deterministic=True).equal(x)
    rows = F.Dropout(0.5, broadcast_dims=(1,)).apply({}, x, deterministic=False, rngs=rngs)
    assert all(len(row.unique()) == 1 for row in rows)
    with pytest.raises(InputShapeError, match="Dropout has no `deterministic`"):
        layer.apply({}, x)


def test_two_draws_and_two_modules_get_their_own_keys() -> None:
    class Twice(F.Module):
        def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            drop = F.Dropout(0.5, deterministic=False)
            one = self.child("one", drop)
            return one(x), one(x), self.child("two", drop)(x)

    first, second, third = Twice().apply({}, torch.ones(64), rngs={"dropout": F.key(0)})
    assert not first.equal(second)
    assert not first.equal(third)


def test_lora_starts_as_its_layer_and_folds_back() -> None:
    x = F.normal(F.key(0), (3, 4))
    base, adapted = F.Dense(5), F.LoRADense(5, rank=2, alpha=4.0)
    variables = adapted.init(F.key(0), x)
    plain = F.select_leaves(variables, F.invert(F.path_matches(r"lora_[ab]$")))
    torch.testing.assert_close(adapted.apply(variables, x), base.apply(plain, x))
    tuned = variables.set("params.lora_b", torch.ones(2, 5))
    merged = F.Tree({"params": F.merge_lora(tuned["params"], scale=4.0 / 2)})
    torch.testing.assert_close(base.apply(merged, x), adapted.apply(tuned, x))
    from_dicts = F.merge_lora({"layer": tuned["params"].to_dict()}, scale=2.0)
    assert from_dicts.at("layer.kernel").equal(merged.at("params.kernel"))
    assert F.LoRADense(5, 2, alpha=0.0).apply(tuned, x).equal(base.apply(plain, x))


def test_positions() -> None:
    table = F.sinusoidal(10, 6)
    assert table[0].tolist() == [0, 1, 0, 1, 0, 1]
    torch.testing.assert_close(table[3, 0], torch.tensor(3.0).sin())
    layer = F.LearnedPositions(5)
    x = torch.zeros(2, 3, 4)
    variables = layer.init(F.key(0), x)
    torch.testing.assert_close(layer.apply(variables, x)[1], variables.at("params.embedding")[:3])
    with pytest.raises(InputShapeError, match="raise max_length"):
        layer.apply(variables, torch.zeros(2, 6, 4))
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    rows = F.alibi_bias(4, torch.tensor([[3], [7]]), torch.arange(8).expand(2, 8))
    assert rows.shape == (2, 4, 1, 8)
    assert rows[1].equal(F.alibi_bias(4, torch.tensor([7]), torch.arange(8)))
    with pytest.raises(InputShapeError, match="the position 5 of 5"):
        layer.apply(variables, x, positions=torch.tensor([0, 1, 5]))
    cos, sin = F.rotary_tables(torch.arange(6), 8)
    query, key = F.normal(F.key(0), (1, 6, 1, 8)), F.normal(F.key(1), (1, 6, 1, 8))
    # Only the distance counts.
    near = (
        F.rotate_heads(query[:, :1].expand(-1, 6, -1, -1), cos, sin),
        F.rotate_heads(key[:, :1].expand(-1, 6, -1, -1), cos, sin),
    )
    scores = (near[0][0, :, 0] @ near[1][0, :, 0].T).diagonal(1)
    torch.testing.assert_close(scores, scores[:1].expand(5))


def test_recurrent_layers() -> None:
    x = F.normal(F.key(0), (2, 5, 3))
    torch_lstm = nn.LSTM(3, 4, batch_first=True)
    gates = ("i", "f", "g", "o")
    w, u = torch_lstm.weight_ih_l0.detach().chunk(4), torch_lstm.weight_hh_l0.detach().chunk(4)
    b = (torch_lstm.bias_ih_l0 + torch_lstm.bias_hh_l0).detach().chunk(4)
    cell = {f"i{gate}": {"kernel": w[i].T} for i, gate in enumerate(gates)}
    cell |= {f"h{gate}": {"kernel": u[i].T, "bias": b[i]} for i, gate in enumerate(gates)}
    out = F.RNN(F.LSTMCell(4)).apply({"params": {"cell": cell}}, x)
    torch.testing.assert_close(out, torch_lstm(x)[0])
    reverse = F.RNN(F.LSTMCell(4), reverse=True).apply({"params": {"cell": cell}}, x.flip(1))
    torch.testing.assert_close(reverse.flip(1), out)
    both = F.Bidirectional(F.GRUCell(4), F.LSTMCell(3))
    assert both.apply(both.init(F.key(0), x), x).shape == (2, 5, 7)
    carry, _ = F.RNN(F.LSTMCell(4), return_carry=True).apply({"params": {"cell": cell}}, x)
    torch.testing.assert_close(carry[1], out[:, -1])


@pytest.mark.parametrize(
    ("init", "deviation"),
    [
        (lecun_normal(), (1 / 200) ** 0.5),
        (lecun_uniform(), (1 / 200) ** 0.5),
        (glorot_normal(), (2 / 500) ** 0.5),
        (glorot_uniform(), (2 / 500) ** 0.5),
        (he_normal(), (2 / 200) ** 0.5),
        (he_uniform(), (2 / 200) ** 0.5),
        (scaled_normal(0.3), 0.3),
        (scaled_truncated_normal(0.3), 0.3 * 0.8796),
        (scaled_uniform(0.3), 0.3 / 12**0.5),
        (constant(2.0), 0.0),
    ],
)
def test_initialisers_have_their_deviation(init: Any, deviation: float) -> None:
    value = init(F.key(0), (200, 300), torch.float32, torch.device("cpu"))
    assert float(value.std()) == pytest.approx(deviation, rel=0.02, abs=1e-9)


@pytest.mark.parametrize("shape", [(6, 6), (8, 3), (3, 8), (2, 4, 3)])
def test_orthogonal_initialiser(shape: tuple[int, ...]) -> None:
    matrix = orthogonal()(F.key(0), shape, torch.float64, torch.device("cpu")).reshape(-1, shape[-1])
    small_side = matrix.mT @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.mT
    torch.testing.assert_close(small_side, torch.eye(len(small_side), dtype=torch.float64))


def test_layers_check_their_inputs() -> None:
    with pytest.raises(InputShapeError, match="5 channels do not divide into 2 groups"):
        F.GroupNorm(2).init(F.key(0), torch.ones(1, 3, 5))
    with pytest.raises(InputShapeError, match=r"window over 2 dimensions.*channels\)"):
        F.Conv(3, (2, 2)).init(F.key(0), torch.ones(3, 5))
    with pytest.raises(InputShapeError, match="pass integers"):
        F.Embed(3, 2).init(F.key(0), torch.ones(2))
    with pytest.raises(InputShapeError, match="has no use_running_average"):
        F.BatchNorm().init(F.key(0), torch.ones(2, 3))
    with pytest.raises(InputShapeError, match="5 features do not divide into 3 groups"):
        F.Conv(5, 3, groups=3).init(F.key(0), torch.ones(1, 4, 3))
    with pytest.raises(InputShapeError, match=r"\(2,\) positions.*spans \(3,\)"):
        F.Conv(5, 3, padding="VALID").init(F.key(0), torch.ones(1, 2, 3))
    with pytest.raises(InputShapeError, match="SAME, VALID or numbers"):
        F.max_pool(torch.ones(1, 4, 3), 2, padding="CAUSAL")
    with pytest.raises(InputShapeError, match=r"cannot contract the dims 5 .*\(2, 4, 5\)"):
        F.DenseGeneral(3, 5).init(F.key(0), torch.ones(2, 4, 5))
    with pytest.raises(InputShapeError, match="row numbers from 1 to 7 for a table of 3 rows"):
        F.Embed(3, 2).apply({"params": {"embedding": torch.ones(3, 2)}}, torch.tensor([1, 7]))
    with pytest.raises(InputShapeError, match="lengths of shape"):
        F.RNN(F.GRUCell(2)).init(F.key(0), torch.ones(2, 3, 4), lengths=torch.ones(3))
    with pytest.raises(InputShapeError, match=r"rate 1\.5"):
        F.Dropout(1.5).apply({}, torch.ones(2), deterministic=True)
    with pytest.raises(InputShapeError, match="two operands"):
        F.Einsum((2,), "ab->b").init(F.key(0), torch.ones(2, 2))


@pytest.mark.parametrize("layer", [F.LayerNorm(), F.RMSNorm(), F.GroupNorm(2), F.BatchNorm(False), F.Conv(3, 3)])
def test_double_inputs_meet_single_parameters(layer: Any) -> None:
    x = F.normal(F.key(0), (2, 5, 4), torch.float64)
    variables = layer.init(F.key(0), x)
    out, updated = layer.apply(variables, x, mutable=True)
    assert out.dtype == torch.float64
    assert {leaf.dtype for leaf in F.tree_leaves(updated)} == {torch.float32}


def test_a_kernel_without_inputs_has_its_shape() -> None:
    assert F.Dense(3).init(F.key(0), torch.ones(2, 0)).at("params.kernel").shape == (0, 3)


def test_initialisers_refuse_what_they_do_not_know() -> None:
    with pytest.raises(UsageError, match="variance scaling by 'gauss'"):
        variance_scaling(1.0, "fan_in", "gauss")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="did you mean 'fan_in'"):
        variance_scaling(1.0, "fan_inn", "normal")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"fans over the dims \[5, -1\] of the shape \(2, 3\)"):
        lecun_normal(5)(F.key(0), (2, 3), torch.float32, torch.device("cpu"))


def test_an_orthogonal_vector_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the shape \(4,\) cannot be orthogonal"):
        orthogonal()(F.key(0), (4,), torch.float32, torch.device("cpu"))
