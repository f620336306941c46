"""The model: every option runs, is causal, compiles as one graph, and decodes as it trains."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch

from piledriver.core.errors import ConfigError, UsageError
from piledriver.models import (
    KVCache,
    ModelConfig,
    MoEConfig,
    Transformer,
    initialise,
    learning_rate_scales,
    parameter_axes,
)
from piledriver.models.decoding import cached_logits, decode, most_likely
from piledriver.models.model_size import parameter_count
from tests.models.shapes import BASE, SHAPES

every_shape = pytest.mark.parametrize("name", SHAPES)


@every_shape
def test_a_token_never_sees_what_follows(name: str) -> None:
    model, tokens = Transformer(SHAPES[name]), torch.randint(61, (1, 12))
    changed = tokens.clone()
    changed[0, 7:] = torch.randint(61, (5,))
    torch.testing.assert_close(model(tokens)[:, :7], model(changed)[:, :7])
    assert not torch.allclose(model(tokens)[:, 7:], model(changed)[:, 7:])


@every_shape
def test_the_cache_gives_what_the_whole_sequence_gives(name: str) -> None:
    model, tokens = Transformer(SHAPES[name]), torch.randint(61, (2, 12))
    cache = KVCache(model.config, batch=2, length=16)
    places = torch.arange(12).expand(2, 12)
    with torch.no_grad():
        whole = model(tokens)
        steps = [model(tokens[:, :5], cache=cache, positions=places[:, :5])]
        steps += [model(tokens[:, i : i + 1], cache=cache, positions=places[:, i : i + 1]) for i in range(5, 12)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-5, rtol=1e-4)


def test_rows_of_a_cache_may_stand_at_different_positions() -> None:
    model = Transformer(SHAPES["llama"])
    long, short = torch.randint(61, (1, 9)), torch.randint(61, (1, 4))
    cache = KVCache(model.config, batch=2, length=16)
    padded = torch.cat((long[:, :8], torch.nn.functional.pad(short[:, :3], (0, 5))))
    with torch.no_grad():
        model(padded, cache=cache, positions=torch.arange(8).expand(2, 8))
        last = torch.cat((long[:, 8:], short[:, 3:]))
        both = model(last, cache=cache, positions=torch.tensor([[8], [3]]))
        torch.testing.assert_close(both[0, 0], model(long)[0, -1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(both[1, 0], model(short)[0, -1], atol=1e-5, rtol=1e-4)


# One shape for each kind of code: the others differ in numbers and in branches that no graph depends on.
@pytest.mark.parametrize("name", ["llama", "gpt2", "alibi-capped", "window", "moe", "latent", "sinks", "chunked"])
def test_one_graph_and_the_same_gradients(name: str) -> None:
    plain = Transformer(SHAPES[name])
    compiled = copy.deepcopy(plain)
    tokens = torch.randint(61, (2, 12))
    targets = tokens.roll(-1, dims=1)
    expected = plain(tokens, targets)
    expected.total.backward()
    sums = torch.compile(compiled, backend="aot_eager", fullgraph=True)(tokens, targets)
    sums.total.backward()
    torch.testing.assert_close(sums.total, expected.total)
    for (key, ours), theirs in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=key, atol=1e-4, rtol=1e-4)
    torch.compiler.reset()


def test_all_blocks_and_all_decode_steps_share_one_graph() -> None:
    model, tokens = Transformer(ModelConfig(**{**BASE, "layers": 5})), torch.randint(61, (2, 12))
    places, cache = torch.arange(12).expand(2, 12), KVCache(model.config, batch=2, length=16)
    stats = torch._dynamo.utils.counters["stats"]
    for block in model.blocks.values():
        block.compile(fullgraph=True, backend="aot_eager")
    stats.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler looks at the gradient of what flows between blocks
        model(tokens, tokens).total.backward()
    assert stats["unique_graphs"] == 1
    whole = Transformer(model.config)
    step = torch.compile(whole, fullgraph=True, backend="aot_eager")
    stats.clear()
    with torch.no_grad():
        steps = [step(tokens[:, i : i + 1], cache=cache, positions=places[:, i : i + 1]) for i in range(12)]
        torch.testing.assert_close(torch.cat(steps, dim=1), whole(tokens), atol=1e-5, rtol=1e-4)
    assert stats["unique_graphs"] == 1
    torch.compiler.reset()


def test_there_is_one_graph_for_each_kind_of_block() -> None:
    config = dataclasses.replace(SHAPES["both-norms"], layers=4, full_attention_layers=(1, 3))
    model, tokens = Transformer(config), torch.randint(61, (2, 12))
    stats = torch._dynamo.utils.counters["stats"]
    for block in model.blocks.values():
        block.compile(fullgraph=True, backend="aot_eager")
    stats.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            model(tokens, tokens).total.backward()
    assert stats["unique_graphs"] == 2, "windowed, and with full attention"
    torch.compiler.reset()


@every_shape
def test_every_parameter_gets_a_gradient_in_bf16_compute(name: str) -> None:
    model = Transformer(SHAPES[name])
    model.compute_dtype = torch.bfloat16
    tokens = torch.randint(61, (2, 12))
    assert model(tokens).dtype == torch.bfloat16
    model(tokens, tokens.roll(-1, dims=1)).total.backward()
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, key
        assert parameter.grad.dtype == torch.float32, key
        assert parameter.grad.abs().sum() > 0, key
        assert parameter.grad.isfinite().all(), key


@every_shape
def test_bf16_compute_stays_near_fp32(name: str) -> None:
    model = Transformer(SHAPES[name])
    tokens = torch.randint(61, (2, 12))
    with torch.no_grad():
        exact = model(tokens, tokens)
        model.compute_dtype = torch.bfloat16
        rounded = model(tokens, tokens)
    torch.testing.assert_close(rounded.cross_entropy, exact.cross_entropy, rtol=0.05, atol=0.0)


@every_shape
def test_axes_and_count_cover_every_parameter(name: str) -> None:
    model = Transformer(SHAPES[name])
    axes = parameter_axes(model)
    config = model.config
    sizes = {
        "vocab": config.vocab_size,
        "embed": config.dim,
        "positions": config.max_positions,
        "head_dim": config.head_dim,
        "experts": config.moe.experts if config.moe else 0,
        "router": config.moe.experts if config.moe else 0,
    }
    for key, parameter in model.named_parameters():
        assert len(axes[key]) == parameter.dim(), key
        for axis, size in zip(axes[key], parameter.shape, strict=True):
            assert size == sizes.get(axis, size), (key, axis)
            assert axis != "heads" or size % config.heads == 0, key
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    one, two, other = (Transformer(SHAPES["moe"], seed=seed) for seed in (3, 3, 4))
    with torch.device("meta"):
        late = Transformer(SHAPES["moe"])
    late.to_empty(device="cpu")
    initialise(late, seed=3)
    for key, parameter in one.named_parameters():
        assert torch.equal(parameter, two.get_parameter(key))
        assert torch.equal(parameter, late.get_parameter(key))
        assert parameter.dim() == 1 or not torch.equal(parameter, other.get_parameter(key))
    deep = Transformer(ModelConfig(**{**BASE, "dim": 128, "layers": 8}))
    down, gate_up = deep.get_parameter("blocks.0.mlp.down.weight"), deep.get_parameter("blocks.0.mlp.gate_up.weight")
    assert gate_up.std().item() == pytest.approx(0.2, rel=0.05)
    assert down.std().item() == pytest.approx(0.2 / 4, rel=0.05)


def test_rotary_table_survives_a_change_of_dtype_and_device() -> None:
    model = Transformer(SHAPES["llama3"])
    assert model.rotary is not None
    table = model.rotary.table.clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.rotary.table, table)
    with torch.device("meta"):
        late = Transformer(SHAPES["llama3"])
    late.to_empty(device="cpu")
    assert late.rotary is not None
    assert torch.equal(late.rotary.table, table)
    assert "rotary.table" not in model.state_dict()


def test_mup_keeps_updates_alike_at_every_width() -> None:
    """After one Adam step logits move by about as much at 8 times the width; without muP they move far more."""

    def movement(dim: int, base: int | None) -> float:
        config = ModelConfig(
            vocab_size=61, dim=dim, layers=2, heads=4, mlp_dim=2 * dim, tied=False, mup_base_dim=base, init_std=0.1
        )
        model, tokens = Transformer(config), torch.randint(61, (4, 32))
        scales = learning_rate_scales(model)
        groups = [{"params": [p], "lr": 0.01 * scales[name]} for name, p in model.named_parameters()]
        optimizer = torch.optim.Adam(groups)
        before = model(tokens).detach()
        sums = model(tokens[:, :-1], tokens[:, 1:])
        (sums.total / sums.tokens).backward()
        optimizer.step()
        return (model(tokens).detach() - before).std().item()

    def widths(base: int | None) -> float:
        torch.manual_seed(0)
        return movement(256, base) / movement(32, base)

    assert 0.4 < widths(32) < 2.5
    assert widths(None) > 2 * widths(32)


def test_pipeline_stages_compose() -> None:
    model, tokens = Transformer(SHAPES["llama"]), torch.randint(61, (1, 8))
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    first.norm = first.head = None
    del first.blocks["1"]
    second.embedding = None
    del second.blocks["0"]
    torch.testing.assert_close(second(first(tokens)), model(tokens))
    assert set(first.state_dict()) | set(second.state_dict()) == set(model.state_dict())


def test_wrong_use_is_named() -> None:
    model = Transformer(SHAPES["llama"])
    with pytest.raises(UsageError, match="65 tokens is longer than max_positions 64"):
        model(torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(UsageError, match="cache and positions"):
        model(torch.zeros(1, 4, dtype=torch.long), positions=torch.zeros(1, 4, dtype=torch.long))
    for bad, message in [
        ({"kv_heads": 3}, "not a multiple of kv_heads 3"),
        ({"layers": 0}, "layers is 0"),
        ({"head_dim": 5}, "even number"),
        ({"moe": MoEConfig(experts=2, experts_per_token=3)}, "experts_per_token is 3"),
        ({"full_attention_layers": (9,)}, "block 9"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ModelConfig(**{**BASE, **bad})


def test_an_empty_prompt_is_an_error_that_says_what_to_start_with() -> None:
    model = Transformer(ModelConfig(vocab_size=8, dim=8, layers=1, heads=1))
    with pytest.raises(UsageError, match=r"the prompt is empty.*document boundary token"):
        decode(cached_logits(model, 1, 4), torch.empty(1, 0, dtype=torch.long), 4, most_likely)
