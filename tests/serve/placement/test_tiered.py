"""A folder larger than memory: its blocks come from disk, and the answer is that of the model in memory."""

import json
import os
import subprocess
import sys

import pytest
import torch

from piledriver.cli.main import main
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import load_folder, save_folder
from piledriver.models.quantised import quantise_linears
from piledriver.serve import SamplingParams, generate
from piledriver.serve.placement import dispatch_model
from piledriver.serve.placement.tiered_model import open_tiered
from tests.compress.test_formats import FORMATS, rewrite
from tests.patience import HANG_S
from tests.serve.text.test_detokenizer import byte_level

TOKENS = torch.arange(20).view(2, 10)


def make(place, **shape):
    tokenizer = byte_level(place)
    (place / "byte_level.json").rename(place / "tokenizer.json")
    model = Transformer(ModelConfig(vocab_size=tokenizer.vocab_size, max_positions=64, **shape))
    torch.nn.init.normal_(model.output_weight(), std=0.3)
    save_folder(model, place, max_shard_bytes=20_000_000)
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("model"), dim=128, layers=6, heads=4, kv_heads=2, mlp_dim=256)


@torch.no_grad()
def test_blocks_are_assembled_from_the_files(folder):
    whole = load_folder(folder)
    opened = open_tiered(folder, length=32, max_memory={"cpu": 3_000_000})
    assert opened.stream is not None
    assert opened.plan.weights["disk"] > 0
    assert any(parameter.is_meta for parameter in opened.model.parameters())
    for _ in range(3):
        assert torch.equal(opened.model(TOKENS), whole(TOKENS))
    assert open_tiered(folder, length=32, max_memory={"cpu": 10**9}).stream is None
    half = open_tiered(folder, length=32, max_memory={"cpu": 3_000_000}, dtype=torch.bfloat16)
    assert torch.equal(half.model(TOKENS), load_folder(folder, dtype=torch.bfloat16)(TOKENS))


def test_generate_offloads_and_answers_the_same(folder, capsys):
    words = ["generate", str(folder), "Hello", "Once", "-n", "2", "--max-tokens", "5", "--json"]
    assert main(words) == 0
    expected = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main([*words, "--offload", "--memory", "3MB"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected
    assert main([*words, "--memory", "3MB"]) == 2
    assert "add --offload" in capsys.readouterr().err
    for verb, more in (("generate", ["--quantise", "int8"]), ("serve", ["--tp", "2"])):
        assert main([verb, str(folder), "--offload", *more]) == 2
        assert f"{more[0]} and --offload do not go together" in capsys.readouterr().err


@torch.no_grad()
@pytest.mark.parametrize("case", ["int8", "int8 with its head", "gptq", "awq", "fp8"])
def test_a_quantised_folder_streams_packed(folder, tmp_path, case):
    model = load_folder(folder)
    if case.startswith("int8"):
        quantise_linears(model, "int8", head="int8" if "head" in case else None)
    save_folder(model, tmp_path)
    if case in FORMATS:
        settings, encode, _ = FORMATS[case]
        rewrite(tmp_path, settings, encode)
    files = sorted(os.listdir(tmp_path))
    whole = load_folder(tmp_path)
    resident = open_tiered(tmp_path, length=32, max_memory={"cpu": 10**9})
    assert resident.stream is None
    assert torch.equal(resident.model(TOKENS), whole(TOKENS))
    needs = resident.plan.needs
    enough = resident.plan.weights["cpu"] + needs.activations + needs.cache
    opened = open_tiered(tmp_path, length=32, max_memory={"cpu": enough - 1000})
    assert opened.stream is not None
    assert opened.plan.weights["disk"] > 0
    for _ in range(3):
        assert torch.equal(opened.model(TOKENS), whole(TOKENS))
    streamed = [tensor for block in opened.stream.blocks for tensor in block.tensors]
    assert any(tensor.absent.dtype.itemsize == 1 for tensor in streamed) == (case != "fp8")  # which is read dense
    assert sorted(os.listdir(tmp_path)) == files


def test_dispatch_streams_quantised_layers(folder, tmp_path):
    model = load_folder(folder)
    quantise_linears(model, "int8")
    save_folder(model, tmp_path)
    again, whole = load_folder(tmp_path), load_folder(tmp_path)
    ends = {name: "cpu" for name, _ in again.named_children() if name != "blocks"}
    dispatch_model(again, {**ends, "blocks": "disk"}, offload_dir=tmp_path / "offload")
    assert torch.equal(again(TOKENS), whole(TOKENS))


def test_where_one_block_fits_none_is_fetched_ahead(folder):
    roomy = open_tiered(folder, length=16, max_memory={"cpu": 3_000_000})
    sizes = [sum(one.nbytes for one in block.parameters()) for block in load_folder(folder).blocks.values()]
    taken = roomy.plan.needs.activations + roomy.plan.needs.cache
    ends = sum(roomy.plan.weights.values()) - sum(sizes)
    tight = open_tiered(folder, length=16, max_memory={"cpu": taken + ends + int(2.5 * max(sizes))})
    assert (roomy.plan.depth, roomy.stream.stream.depth) == (1, 1)
    assert (tight.plan.depth, tight.stream.stream.depth) == (0, 0)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(tight.model(TOKENS), roomy.model(TOKENS))
    assert tight.stream.stream.depth == 0
    assert tight.stream.memory.arena.nbytes <= 2 * max(sizes) < roomy.stream.memory.arena.nbytes


def test_run_prints_map_prediction_answer_and_measurement(folder, capsys):
    words = ["run", str(folder), "Hello", "--max-tokens", "6", "--memory", "3MB"]
    assert main(words) == 0
    out = capsys.readouterr().out
    tokenizer_text = generate(folder, ["Hello"], SamplingParams(max_tokens=6, temperature=0))[0].completions[0].text
    assert "blocks.0" in out
    assert "predicted" in out
    assert "measured" in out
    assert "weights came from disk" in out
    assert "Hello" in out
    assert isinstance(tokenizer_text, str)


_LIMITED = """
import json, resource, sys, threading
threading.stack_size(1 << 20)
import torch
import torch._dynamo  # planning imports it; code is not part of the limit
from piledriver.serve import Engine, SamplingParams
from piledriver.serve.placement.tiered_model import open_tiered
folder, model_bytes = sys.argv[1], int(sys.argv[2])
# Threads and BLAS allocate their own buffers once, before the limit.
torch.zeros(1 << 22)
torch.randn(512, 512) @ torch.randn(512, 512)
status = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith("Vm"))
# Not of the address space: allocators reserve more of it than they use.
limit = int(status["VmData"].split()[0]) * 1024 + model_bytes // 4
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.empty(model_bytes // 3, dtype=torch.uint8).fill_(1)
    raise SystemExit("the limit does not hold")
except RuntimeError:
    pass
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
opened = open_tiered(folder, length=16)
engine = Engine(opened.model, max_sequences=1, max_context=16, cache_tokens=16, fused=False)
[output] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0))
places = {str(place): size for place, size in opened.plan.weights.items()}
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(json.dumps({"tokens": output.completions[0].token_ids, "places": places, "grown": grown}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of a process's memory are Linux's here")
def test_a_model_four_times_larger_than_the_memory_limit_answers(tmp_path):
    folder = make(tmp_path, dim=256, layers=192, heads=4, mlp_dim=512)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(folder), str(size)],
        capture_output=True,
        # No allocator may hold address space in reserve, from which it would serve what the limit refuses.
        env={**os.environ, "MALLOC_ARENA_MAX": "1", "MIMALLOC_ARENA_RESERVE": "0", "MIMALLOC_ARENA_EAGER_COMMIT": "0"},
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["places"]["disk"] > 0.7 * size
    assert found["grown"] < size / 4
    [want] = generate(folder, [[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0), max_context=16)
    assert found["tokens"] == want.completions[0].token_ids
