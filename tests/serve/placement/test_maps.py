"""Device maps by time: room for activations and cache, and the threads of Accelerate's tracker about maps."""

import pytest
import torch
from torch import nn

from piledriver.engine.offload.stream.depth import window_bytes
from piledriver.models import ModelConfig, Transformer
from piledriver.models.config import MoEConfig
from piledriver.plan.placement import room
from piledriver.plan.placement.by_time import LinkRates, place_by_time
from piledriver.plan.placement.room import WORKSPACE_BYTES, inference_room
from piledriver.plan.placement.sizes import compute_module_sizes
from piledriver.serve.placement import PlacementError, infer_auto_device_map, init_empty_weights
from piledriver.serve.placement.maps.device_map import get_balanced_memory
from piledriver.serve.placement.maps.host_memory import left_by_group

RATES = LinkRates(host=50e9, disk=2e9, memory=3e12, flops=5e14)
MIB = 1 << 20


@pytest.fixture(scope="module")
def model():
    with init_empty_weights():
        return Transformer(ModelConfig(vocab_size=4096, dim=1024, layers=12, heads=8)).to(torch.bfloat16)


def used(model, found, device):
    sizes = compute_module_sizes(model)
    blocks = [name for name in found.places if name.startswith("blocks.")]
    streamed = [sizes[name] for name in blocks if found.places[name] in ("cpu", "disk")]
    held = sum(sizes.get(name, 0) for name, place in found.places.items() if place == device)
    return held + window_bytes(streamed, 1) + found.needs.activations + found.needs.cache + WORKSPACE_BYTES


def test_room_for_activations_and_cache_issue_608(model):
    """A map made for a batch leaves the room of that batch; larger batches leave fewer blocks on the device."""
    limit, resident = WORKSPACE_BYTES + 400 * MIB, []
    for batch, length in ((1, 16), (2, 512), (4, 512)):
        found = place_by_time(model, {0: limit, "cpu": 1 << 40}, batch=batch, length=length, rates=RATES)
        assert used(model, found, 0) <= limit
        resident.append(sum(place == 0 for place in found.places.values()))
    assert resident == sorted(resident, reverse=True)
    assert resident[0] > resident[-1]
    with pytest.raises(PlacementError, match="lower the batch or the length"):
        infer_auto_device_map(model, {0: limit}, batch=512, length=2048)


def test_room_grows_with_the_batch(model):
    one, four = inference_room(model, 1, 128), inference_room(model, 4, 128)
    assert four.cache == 4 * one.cache == 4 * 128 * 12 * 2 * 1024 * 2
    assert one.activations >= 128 * 4096 * 2, "at least the logits"
    assert 3 * one.activations < four.activations < 5 * one.activations


class KeepsAll(nn.Module):
    """Adds up the outputs of its blocks at the end."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))

    def forward(self, tokens):
        outputs = [tokens.to(torch.float32)[..., None].expand(-1, -1, 8)]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
        return torch.stack(outputs).sum(0)


class Windows(nn.Module):
    """Blocks that copy windows of their input, the seventh larger ones than the others."""

    class Block(nn.Module):
        def __init__(self, window):
            super().__init__()
            self.window, self.linear = window, nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x).unfold(1, self.window, 1).contiguous().mean(-1)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Block(8 if layer == 6 else 1) for layer in range(9))

    def forward(self, tokens):
        x = tokens.to(torch.float32)[..., None].expand(-1, -1, 8)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("case", ["windows", "experts", "llama", "keeps all", "window sizes"])
def test_a_few_blocks_have_the_peak_of_all(case):
    shape = {"vocab_size": 64, "dim": 32, "layers": 9, "heads": 2, "mlp_dim": 64}
    with torch.device("meta"):
        if case == "windows":
            model = Transformer(ModelConfig(**shape, sliding_window=4, full_attention_layers=(3, 7)))
        elif case == "experts":
            model = Transformer(ModelConfig(**shape, moe=MoEConfig(experts=4, dense_layers=(0,))))
        elif case == "llama":
            transformers = pytest.importorskip("transformers")
            config = transformers.LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=9, num_attention_heads=2
            )
            model = transformers.LlamaForCausalLM(config)
        else:
            model = KeepsAll() if case == "keeps all" else Windows()
    names = [name for name, _ in model.named_parameters()]
    found = inference_room(model, 2, 16).activations
    assert found == room._peak(model, 2, 16, torch.float32)
    assert names == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("width", [10, 100, 1_000, 3_000, 20_000])
def test_balanced_memory_offloads_nothing_that_fits_issue_1888(width):
    """Devices with room for the whole model get all of it, however uneven its layers are."""
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(10, 100), nn.Linear(100, 5), nn.Linear(5, width))
    memory = {0: 10**9, 1: 10**9, "cpu": 10**9}
    places = infer_auto_device_map(model, get_balanced_memory(model, memory))
    assert set(places.values()) <= {0, 1}


def test_small_layers_use_a_device_that_the_largest_does_not_fit_issue_3041():
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100), nn.Linear(100, 5_000), nn.Linear(5_000, 10))
    largest = 4 * 5_000 * 101
    places = infer_auto_device_map(
        model, {0: largest + 250_000, "cpu": 10**9}, clean_result=False, fallback_allocation=True
    )
    assert places["0"] == 0
    assert places["2"] == "cpu"


def test_what_fits_stays_and_the_fastest_order_is_taken(model):
    whole = place_by_time(model, {0: 80 << 30, "cpu": 1 << 40}, batch=1, length=16, rates=RATES)
    assert set(whole.places.values()) == {0}
    tight = {0: WORKSPACE_BYTES + 200 * MIB, "cpu": 60 * MIB}
    three = place_by_time(model, tight, batch=1, length=16, rates=RATES)
    assert {0, "cpu", "disk"} == set(three.places.values())
    assert three.seconds > whole.seconds
    assert three.seconds >= three.weights["disk"] / RATES.disk
    assert "s a token" in str(three)
    host = place_by_time(model, {"cpu": 200 * MIB}, batch=1, length=16, rates=RATES)
    assert {"cpu", "disk"} == set(host.places.values())
    # Many tokens compute long enough to hide a transfer: streamed blocks lie among resident ones.
    slow = LinkRates(host=50e9, disk=2e9, memory=3e12, flops=4e13)
    spread = place_by_time(model, {0: WORKSPACE_BYTES + 400 * MIB, "cpu": 1 << 40}, batch=1, length=256, rates=slow)
    places = [place for name, place in spread.places.items() if name.startswith("blocks.")]
    assert places != sorted(places, key=str)


def test_one_of_batch_and_length_is_an_error(model):
    with pytest.raises(PlacementError, match="one of batch and length is missing"):
        infer_auto_device_map(model, {"cpu": 10**9}, batch=1)


@pytest.mark.parametrize(
    ("own", "folder", "limit", "used", "cached"),
    [
        ("0::/job/step", "", "memory.max", "memory.current", "file"),
        (
            "5:cpu:/\n4:memory:/job/step\n0::/",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_cache",
        ),
    ],
)
def test_limits_of_control_groups_count_in_both_versions(tmp_path, own, folder, limit, used, cached):
    for path, most in (("job", "1000"), ("job/step", "max" if folder == "" else str(2**63 - 4096))):
        group = tmp_path / folder / path
        group.mkdir(parents=True)
        (group / limit).write_text(most + "\n")
        (group / used).write_text("700\n")
        (group / "memory.stat").write_text(f"anon 600\n{cached} 100\n")
    assert min(left_by_group(own, tmp_path)) == 400
    assert left_by_group("0::/elsewhere", tmp_path) == []
