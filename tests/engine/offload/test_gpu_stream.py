"""On a CUDA device: streamed weights give the bits of the undivided model; maps leave the room they were asked for."""

import gc

import pytest
import torch
from safetensors.torch import save_file

from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import load_folder, save_folder
from piledriver.models.quantised import quantise_linears
from piledriver.plan.placement.room import WORKSPACE_BYTES
from piledriver.serve.placement import (
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from piledriver.serve.placement.tiered_model import open_tiered
from tests.engine.gpu import ON_GPU

pytestmark = ON_GPU

CONFIG = ModelConfig(vocab_size=1024, dim=1024, layers=8, heads=8)


def made(seed=0, dtype=torch.bfloat16):
    return Transformer(CONFIG, seed=seed).to(dtype).requires_grad_(False).eval()


def parts(model, place):
    return {name: 0 for name, _ in model.named_children() if name != "blocks"} | {"blocks": place}


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
@torch.no_grad()
def test_blocks_in_host_memory(kind):
    model = made()
    if kind:
        quantise_linears(model, kind)
    tokens = torch.randint(1024, (2, 64), device="cuda")
    model.cuda()
    want = model(tokens)
    model.cpu()
    gc.collect()
    torch.cuda.empty_cache()
    dispatch_model(model, parts(model, "cpu"))
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        assert torch.equal(model(tokens), want)
    block = sum(t.nbytes for t in made().blocks["0"].state_dict().values())
    if kind is None:
        assert before < 6 * block, "the blocks are not on the device"


@torch.no_grad()
def test_blocks_on_disk(tmp_path):
    model = made().cuda()
    tokens = torch.randint(1024, (2, 64), device="cuda")
    want = model(tokens)
    save_file({name: value.cpu() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = made()
    places = parts(empty, "disk")
    got = load_checkpoint_and_dispatch(empty, tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    for _ in range(5):
        assert torch.equal(got(tokens), want)


@torch.no_grad()
def test_a_quantised_folder_streams_packed_on_a_gpu(tmp_path):
    save_folder(quantise_linears(made(), "int4"), tmp_path)
    tokens = torch.randint(1024, (2, 64), device="cuda")
    want = load_folder(tmp_path, device="cuda")(tokens)
    room = {"batch": 2, "length": 64}
    resident = open_tiered(tmp_path, **room, max_memory={0: 4 << 30, "cpu": 0})
    assert resident.stream is None
    assert torch.equal(resident.model(tokens), want)
    needs = resident.plan.needs
    enough = resident.plan.weights[0] + needs.activations + needs.cache + WORKSPACE_BYTES
    for host in (0, 4 << 30):
        opened = open_tiered(tmp_path, **room, max_memory={0: enough - 1000, "cpu": host})
        assert opened.stream is not None
        for _ in range(3):
            assert torch.equal(opened.model(tokens), want)


@torch.no_grad()
def test_no_map_runs_out_of_memory_at_its_batch(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False).eval()
    limit = 2 << 30
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        seen = set()
        for batch, length in ((1, 256), (4, 1024), (8, 1536)):
            copied = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
            copied.load_state_dict(model.state_dict())
            copied.requires_grad_(False).eval()
            places = infer_auto_device_map(
                copied, {0: limit, "cpu": 8 << 30}, clean_result=False, batch=batch, length=length
            )
            seen.add(sum(place == 0 for place in places.values()))
            dispatch_model(copied, places)
            tokens = torch.randint(32000, (batch, length), device="cuda")
            torch.cuda.reset_peak_memory_stats()
            copied(tokens, use_cache=True)
            assert torch.cuda.max_memory_reserved() <= limit
            del copied
            gc.collect()
            torch.cuda.empty_cache()
        assert len(seen) > 1, "larger batches leave fewer blocks on the device"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
