"""Streamed weights: the same bits as the undivided model, whatever tier they wait on and whatever runs the blocks."""

import copy
import warnings

import pytest
import torch
from safetensors.torch import save_file

from piledriver.core.errors import CorruptFileError, MissingFileError, StorageError
from piledriver.engine.compile import compile_modules, compile_report, reset_compiler
from piledriver.engine.offload.disk.direct_io import DirectIO
from piledriver.engine.offload.disk.extents import Extent, safetensors_extents
from piledriver.engine.offload.disk.reader import DirectReader
from piledriver.engine.offload.pinned import page_aligned_empty
from piledriver.engine.offload.stream import block_stream as stream_module
from piledriver.engine.offload.stream.block_stream import SlowDiskWarning
from piledriver.engine.offload.stream.model_stream import ModelStream, groups_in
from piledriver.engine.offload.stream.weight_block import Assembled
from piledriver.engine.offload.tier import Tier
from piledriver.models import ModelConfig, Transformer

TOKENS = torch.arange(18).view(2, 9)


@pytest.fixture(scope="module")
def model():
    return Transformer(ModelConfig(vocab_size=64, dim=32, layers=5, heads=4)).requires_grad_(False)


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    return path


def streamed(model, file, **settings):
    made = copy.deepcopy(model)
    extents = safetensors_extents(file)
    stream = ModelStream(groups_in(made, made.blocks, "blocks"), lambda name, _: extents[name], "cpu", **settings)
    return made, stream


@torch.no_grad()
def test_logits_are_bit_equal_and_memory_holds_two_blocks(model, file):
    made, stream = streamed(model, file, deepest=1)
    assert all(parameter.is_meta for parameter in made.blocks.parameters())
    for _ in range(4):
        assert torch.equal(made(TOKENS), model(TOKENS))
        assert all(parameter.is_meta for parameter in made.blocks.parameters())
    assert stream.memory.arena.nbytes == 2 * stream.blocks[0].nbytes
    with torch.inference_mode():
        assert torch.equal(made(TOKENS), model(TOKENS))
    assert torch.equal(copy.deepcopy(made)(TOKENS), model(TOKENS)), "a deep copy streams for itself"
    assert stream.stream.measured_rate(Tier.DISK) > 0


@torch.no_grad()
def test_compiled_blocks_stay_compiled(model, file):
    made, _ = streamed(model, file)
    reset_compiler()
    compile_modules(list(made.blocks.values()), backend="eager")
    for _ in range(3):
        assert torch.equal(made(TOKENS), model(TOKENS))
    report = compile_report()
    assert report.graphs == 1
    assert not report.breaks
    assert not report.recompiles


def test_gradients_are_those_of_resident_weights(model, file):
    made, _ = streamed(model, file)
    found = []
    for one in (model, made):
        hidden = one.embedding(TOKENS).requires_grad_()
        handle = one.embedding.register_forward_hook(lambda *_, hidden=hidden: hidden)
        one(TOKENS).square().sum().backward()
        handle.remove()
        found.append(hidden.grad)
    assert torch.equal(*found)


@torch.no_grad()
def test_order_is_learned_and_a_wrong_guess_costs_no_bits(model, file):
    made, stream = streamed(model, file)
    inputs = []
    handle = made.blocks["0"].register_forward_pre_hook(lambda _, args: inputs.append(args))
    made(TOKENS)
    handle.remove()
    for key in ("3", "0", "4", "0", "3", "0"):
        got, want = made.blocks[key](*inputs[0]), model.blocks[key](*inputs[0])
        assert torch.equal(got[0], want[0])
    assert stream.stream._next[1][0] == 3
    assert torch.equal(made(TOKENS), model(TOKENS))


@torch.no_grad()
def test_assembled_weights(model, file):
    extents = safetensors_extents(file)
    name = "blocks.2.mlp.down.weight"
    made = copy.deepcopy(model)
    halves = [extents[name]] * 2

    def source(at, _):
        return Assembled(tuple(halves), lambda parts: (parts[0] + parts[1]) / 2) if at == name else extents[at]

    ModelStream(groups_in(made, made.blocks, "blocks"), source, "cpu")
    for _ in range(2):
        assert torch.equal(made(TOKENS), model(TOKENS))


def test_an_exception_in_a_block_gives_its_memory_back(model, file):
    made, stream = streamed(model, file)
    with pytest.raises(RuntimeError), torch.no_grad():
        made.blocks["1"](torch.zeros(1, 2, 3), None, None, None, None, None)
    assert made.blocks["1"].mlp.down.weight.is_meta
    with torch.no_grad():
        assert torch.equal(made(TOKENS), model(TOKENS))
    assert stream.stream._uses == [0] * 5


@torch.no_grad()
def test_a_far_slower_disk_is_one_warning(model, file, monkeypatch):
    monkeypatch.setattr(stream_module, "NOTICEABLE_SECONDS", 0.0)
    made, stream = streamed(model, file)
    stream.stream.expected_rates[Tier.DISK] = 1e15
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            made(TOKENS)
    [warning] = [one for one in caught if one.category is SlowDiskWarning]
    assert "MB/s were expected" in str(warning.message)


def test_reads_of_any_alignment(tmp_path):
    path = tmp_path / "bytes"
    content = torch.randint(256, (70_001,), dtype=torch.uint8)
    path.write_bytes(content.numpy().tobytes())
    io = DirectIO(staged_bytes=8192)
    with DirectReader(io) as reader:
        for offset, size in ((0, 70_001), (0, 4096), (1, 1), (4095, 3), (4096, 8192), (8191, 60_000), (70_000, 1)):
            # The second target is as far from the start of a page as the bytes in the file: whole pages in place.
            aligned = page_aligned_empty(torch.Size((offset % 4096 + size,)), torch.uint8)[offset % 4096 :]
            for got in (torch.empty(size, dtype=torch.uint8), aligned):
                reader.read([(Extent(str(path), offset, torch.uint8, (size,)), got)]).wait()
                assert torch.equal(got, content[offset : offset + size])
    io.close()


def test_damaged_files_are_named(tmp_path, model, file):
    whole = file.read_bytes()
    short = tmp_path / "short.safetensors"
    short.write_bytes(whole[:-100])
    with pytest.raises(CorruptFileError, match=r"short.safetensors is truncated: it has"):
        safetensors_extents(short)
    short.write_bytes(whole[:4])
    with pytest.raises(CorruptFileError, match="truncated"):
        safetensors_extents(short)
    with pytest.raises(MissingFileError, match=r"gone\.safetensors"):
        safetensors_extents(tmp_path / "gone.safetensors")
    # Truncated while it is in use.
    short.write_bytes(whole)
    made, _ = streamed(model, short)
    short.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StorageError, match=r"short.safetensors ends at .* bytes too early"), torch.no_grad():
        made(TOKENS)
    # A folder that vanishes before its files were opened.
    other = tmp_path / "other.safetensors"
    other.write_bytes(whole)
    made, _ = streamed(model, other)
    other.unlink()
    with pytest.raises(StorageError, match=r"cannot open .*other.safetensors"), torch.no_grad():
        made(TOKENS)
