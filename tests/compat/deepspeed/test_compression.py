"""`deepspeed.compression` names: every method on BERT-like and Llama-like names, every key understood or refused."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piledriver.compat.deepspeed import init_compression, redundancy_clean, student_initialization
from piledriver.compat.deepspeed.compression import METHODS, parse_groups, read_section
from piledriver.compress.scheduled.fake_quantise import fake_quantise_groups
from piledriver.core.errors import UsageError
from piledriver.models import ModelConfig, Transformer

CONFIGS = Path("/work/shared/ds-configs/configs.jsonl.zst")


class Attention(nn.Module):
    """Grouped-query attention with Llama's names: 4 heads of 8, 2 of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.k_proj, self.v_proj = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(32, 48), "down_proj": nn.Linear(48, 32)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(x)
        return x + self.mlp["down_proj"](self.mlp["up_proj"](x).relu())  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


X = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(1))


def section(method: str, shared: dict[str, Any], params: dict[str, Any], **group: Any) -> dict[str, Any]:
    groups = {"one": {"params": params, **group}}
    return {
        "compression_training": {method: {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}}
    }


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.compression_scheduler.step()


def test_weights_lose_bits_as_training_goes_and_end_on_their_grid(model: Model) -> None:
    shared = {"schedule_offset": 1, "quantize_groups": 4, "quantization_type": "asymmetric", "rounding": "nearest"}
    params = {"start_bits": 8, "target_bits": 3, "quantization_period": 1}
    config = section("weight_quantization", shared, params, modules=["mlp"])
    names = set(model.state_dict())
    dense = model(X)
    init_compression(model, config)
    assert set(model.state_dict()) == names
    assert torch.equal(model(X), dense)  # before the offset
    train(model, 70)
    trained = model(X).detach()
    redundancy_clean(model, config)
    assert type(model.layers[0].mlp["up_proj"]) is nn.Linear
    torch.testing.assert_close(model(X), trained)
    weight = model.layers[0].mlp["up_proj"].weight.detach()
    assert all(len(part.unique()) <= 8 for part in weight.reshape(4, -1))
    torch.testing.assert_close(fake_quantise_groups(weight, 3, 4, symmetric=False), weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("calibration", ["dynamic", "static"])
def test_activations_are_rounded_from_their_step_on(model: Model, calibration: str) -> None:
    shared = {"quantization_type": "symmetric", "range_calibration": calibration, "schedule_offset": 2}
    config = section("activation_quantization", shared, {"bits": 4}, modules=["head"])
    dense = model(X)
    init_compression(model, config)
    assert torch.equal(model(X), dense)
    train(model, 2)
    with torch.no_grad():
        rounded = model(X)
    redundancy_clean(model, config)
    with torch.no_grad():
        assert not torch.equal(model(X), rounded)


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_single_weights_are_masked_and_stay_so(model: Model, method: str) -> None:
    config = section("sparse_pruning", {"method": method, "schedule_offset": 1}, {"dense_ratio": 0.25}, modules=["mlp"])
    init_compression(model, config)
    train(model)
    redundancy_clean(model, config)
    weight = model.layers[1].mlp["down_proj"].weight
    assert float((weight == 0).float().mean()) == pytest.approx(0.75, abs=0.01)
    assert not [name for name, _ in model.named_parameters() if "scores" in name]


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_rows_go_with_the_columns_that_read_them(model: Model, method: str) -> None:
    config = section(
        "row_pruning",
        {"method": method, "schedule_offset": 0},
        {"dense_ratio": 0.5},
        modules=["up_proj"],
        related_modules=[["down_proj"]],
    )
    init_compression(model, config)
    train(model)
    masked = model(X).detach()
    redundancy_clean(model, config)
    assert model.layers[0].mlp["up_proj"].weight.shape == (24, 32)
    assert model.layers[0].mlp["down_proj"].weight.shape == (32, 24)
    torch.testing.assert_close(model(X), masked)


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_heads_go_in_whole_groups(model: Model, method: str) -> None:
    config = section(
        "head_pruning",
        {"method": method, "schedule_offset": 0, "num_heads": 4},
        {"dense_ratio": 0.5},
        modules=["o_proj"],
        related_modules=[["q_proj", "k_proj", "v_proj"]],
    )
    init_compression(model, config)
    train(model)
    masked = model(X).detach()
    redundancy_clean(model, config)
    attention = model.layers[0].self_attn
    assert (attention.q_proj.out_features, attention.k_proj.out_features, attention.o_proj.in_features) == (16, 8, 16)
    torch.testing.assert_close(model(X), masked)


def test_channels_go_with_norm_and_next_convolution() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    shared = {"method": "l1", "schedule_offset": 0}
    config = section("channel_pruning", shared, {"dense_ratio": 0.5}, modules=["^0$"], related_modules=[["^1$", "^3$"]])
    x = torch.randn(2, 3, 8, 8)
    init_compression(model, config)
    masked = model(x).detach()
    redundancy_clean(model, config)
    assert (model[0].out_channels, model[1].num_features, model[3].in_channels) == (4, 4, 4)
    torch.testing.assert_close(model(x), masked)


def test_layers_are_copied_from_the_teacher(model: Model) -> None:
    teacher = Model(layers=4)
    reduction = {
        "enabled": True,
        "keep_number_layer": 2,
        "module_name_prefix": "layers",
        "teacher_layer": [1, 3],
        "other_module_name": ["head"],
    }
    config = {"compression_training": {"layer_reduction": reduction}}
    init_compression(model, config, teacher_model=teacher)
    assert torch.equal(model.layers[1].self_attn.q_proj.weight, teacher.layers[3].self_attn.q_proj.weight)
    assert torch.equal(model.head.weight, teacher.head.weight)
    again = student_initialization(Model(), teacher, config)
    assert torch.equal(again(X), model(X))
    with pytest.raises(UsageError, match="teacher_model"):
        init_compression(Model(), config)


@pytest.mark.parametrize(
    ("method", "shared", "params", "said"),
    [
        ("weight_quantization", {"rounding": "stochastic"}, {"target_bits": 8}, "noise would differ"),
        ("weight_quantization", {"fp16_mixed_quantize": {"enabled": True}}, {"target_bits": 8}, "fp16 optimizer"),
        ("weight_quantization", {}, {}, "no target_bits"),
        ("weight_quantization", {"quantise_groups": 1}, {"target_bits": 8}, "quantize_groups"),
        ("sparse_pruning", {"method": "snip_momentum"}, {"dense_ratio": 0.5}, "Neural Compressor"),
        ("sparse_pruning", {"block_pattern": "4x1"}, {"dense_ratio": 0.5}, "snip_momentum"),
        ("head_pruning", {}, {"dense_ratio": 0.5}, "num_heads"),
        ("row_pruning", {}, {"dense_ratio": 2}, "between 0 and 1"),
        ("activation_quantization", {"range_calibration": "none"}, {"bits": 8}, "dynamic or static"),
        ("pruning", {}, {}, "no key 'pruning'"),
    ],
)
def test_keys_that_are_not_supported_are_refused_with_the_reason(
    model: Model, method: str, shared: dict[str, Any], params: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as error:
        init_compression(model, section(method, shared, params, modules=["mlp"]))
    assert said in str(error.value)


def test_fused_projections_of_this_library_are_refused() -> None:
    ours = Transformer(ModelConfig(vocab_size=32, dim=16, layers=1, heads=2))
    config = section("row_pruning", {}, {"dense_ratio": 0.5}, modules=["gate_up"])
    with pytest.raises(UsageError, match="SmallerShape"):
        init_compression(ours, config)


@pytest.mark.skipif(not CONFIGS.exists(), reason="needs the collection of DeepSpeed configs")
def test_real_configs_are_understood() -> None:
    import zstandard

    seen = 0
    with CONFIGS.open("rb") as file:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file)):
            row = json.loads(line)
            if "compression_training" not in row["text"]:
                continue
            try:
                config = json.loads(row["text"])
            except ValueError:
                continue  # a template, or a document with comments
            if "compression_training" not in config:
                continue
            groups = list(parse_groups(read_section(config)))
            assert all(group.method in METHODS for group in groups)
            seen += 1
    assert seen >= 2


def test_a_bert_of_transformers_runs_deepspeeds_own_example() -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    bert = transformers.BertModel(shape).eval()
    methods: dict[str, Any] = {}
    for method, shared, params, group in (
        (
            "weight_quantization",
            {"quantize_groups": 1},
            {"start_bits": 12, "target_bits": 8},
            {"modules": ["attention.self"]},
        ),
        (
            "row_pruning",
            {"method": "topk"},
            {"dense_ratio": 0.5},
            {
                "modules": ["intermediate.dense"],
                "related_modules": [["layer.\\w+.output.dense"]],
            },
        ),
        (
            "head_pruning",
            {"method": "topk", "num_heads": 4},
            {"dense_ratio": 0.5},
            {
                "modules": ["attention.output.dense"],
                "related_modules": [["self.query", "self.key", "self.value"]],
            },
        ),
    ):
        one = section(method, {**shared, "schedule_offset": 0}, params, **group)["compression_training"]
        methods |= one
    config = {"compression_training": methods}
    tokens = torch.randint(64, (2, 6))
    whole = copy.deepcopy(bert)(tokens).last_hidden_state
    init_compression(bert, config)
    with torch.no_grad():
        masked = bert(tokens).last_hidden_state
    assert masked.shape == whole.shape
    assert not torch.equal(masked, whole)
    redundancy_clean(bert, config)
    layer = bert.encoder.layer[0]
    assert (layer.intermediate.dense.out_features, layer.output.dense.in_features) == (24, 24)
    assert (layer.attention.self.query.out_features, layer.attention.output.dense.in_features) == (16, 16)
    assert not any("scores" in name for name, _ in bert.named_parameters())
