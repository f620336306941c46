"""Quantised checkpoint folders: written and read back, opened by transformers, and those of other tools."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors_torch
import torch
from torch import Tensor

from piledriver import compress
from piledriver.core.errors import CorruptFileError, PiledriverError
from piledriver.evaluate import TransformerScorer
from piledriver.kernels.linear import quantise_weight, weight_codes
from piledriver.models import ModelConfig, Transformer
from piledriver.models.codes import QuantisedCodes
from piledriver.models.interchange import InterchangeError, load_folder, load_weights, save_folder
from piledriver.models.interchange.quantised_layers import pack_words, unpack_words
from piledriver.models.quantised import QuantisedLinear
from piledriver.serve import Engine, SamplingParams

SHAPE = ModelConfig(
    vocab_size=61, dim=64, layers=2, heads=4, kv_heads=2, mlp_dim=96, max_positions=64, init_std=0.08, tied=False
)
TOKENS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(SHAPE).requires_grad_(False)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_words_hold_their_numbers(bits: int, dim: int) -> None:
    numbers = torch.randint(2**bits, (11, 13))
    packed = pack_words(numbers, bits, dim)
    assert packed.dtype == torch.int32
    assert torch.equal(unpack_words(packed, bits, numbers.shape[dim], dim).long(), numbers)


@pytest.mark.parametrize(
    "scheme",
    [*("w4a16-g32", "w4a16-g32-asym", "w8a16", "w8a8", "w8a16-fp8", "w8a8-fp8"), "w8a16-fp8-g128", "w8a8-fp8-g128"],
)
def test_a_folder_reads_back_to_the_same_bits_and_transformers_opens_it(
    model: Transformer, scheme: str, tmp_path: Path
) -> None:
    if "fp8-g128" in scheme:
        model = Transformer(dataclasses.replace(SHAPE, dim=128, mlp_dim=256, head_dim=32)).requires_grad_(False)
    small = compress.quantise(model, scheme, method="gptq", data=TOKENS, skip=["blocks.1.mlp.down"])
    save_folder(small, tmp_path)
    back = load_folder(tmp_path)
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in small.state_dict().items())
    assert torch.equal(back(TOKENS), small(TOKENS))
    assert back.compression == small.compression
    dense = Transformer(model.config)
    load_weights(dense, tmp_path)
    if "w8a8" not in scheme:
        torch.testing.assert_close(dense(TOKENS), small(TOKENS), rtol=1e-4, atol=1e-4)
    # Their int8 inputs span 127.5 steps, ours 127: inputs round to other codes.
    assert_transformers_agrees(tmp_path, small, tolerance=3e-2 if scheme == "w8a8" else 1e-2)


def assert_transformers_agrees(folder: Path, model: Transformer, *, tolerance: float) -> None:
    """Compare logits of the folder, opened by transformers, with the model's."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits = theirs(TOKENS).logits.detach()
    torch.testing.assert_close(logits, model(TOKENS), rtol=tolerance, atol=tolerance * float(logits.abs().max()))


@pytest.mark.parametrize(
    ("tied", "scheme", "ends"),
    [
        (True, "w4a16-g32", {"head": "int8"}),
        (True, "w8a16-fp8", {"embedding": "fp8"}),
        (False, "w4a16-g32", {"head": "int8", "embedding": "int8"}),
        (False, "w8a8", {"head": "int8", "embedding": "fp8"}),
        (False, "w8a16", {"head": "fp8"}),
        (False, None, {"embedding": "int8"}),
    ],
)
def test_embedding_and_head_are_stored_in_8_bits(
    tied: bool, scheme: str | None, ends: dict[str, Any], tmp_path: Path
) -> None:
    model = Transformer(dataclasses.replace(SHAPE, tied=tied)).requires_grad_(False)
    skip = ["*"] if scheme is None else []
    small = compress.quantise(model, scheme or "w8a16", method="gptq", data=TOKENS, skip=skip, **ends)
    save_folder(small, tmp_path)
    back = load_folder(tmp_path)
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in small.state_dict().items())
    kept = {name: isinstance(getattr(back, name), QuantisedCodes) for name in ("embedding", "head")}
    assert kept == {"embedding": tied or "embedding" in ends, "head": not tied and "head" in ends}
    logits = back(TOKENS).detach()
    assert torch.equal(logits, small(TOKENS))
    table = sum(tensor.nbytes for name, tensor in safetensors_torch.load_file(tmp_path / "model.safetensors").items()
                if not name.startswith("model.layers"))  # fmt: skip
    elements = SHAPE.vocab_size * SHAPE.dim
    quantised = sum(kept.values())
    assert table < elements * (quantised + 4 * (2 - tied - quantised)) + 16 * SHAPE.vocab_size + 4 * SHAPE.dim + 64
    # The loss reads the weight that the codes stand for.
    losses = back(TOKENS[:, :-1], TOKENS[:, 1:], reduction="none")
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="none"
    )
    torch.testing.assert_close(losses.flatten(), expected, rtol=1e-4, atol=1e-4)
    assert set(small.compression[-1]["relative_error"]) >= set(ends)
    half = load_folder(tmp_path, dtype=torch.bfloat16).requires_grad_(False)
    assert half(TOKENS).dtype == torch.bfloat16
    assert float((half(TOKENS).float() - logits).norm() / logits.norm()) < 0.03
    assert_transformers_agrees(tmp_path, small, tolerance=3e-2 if scheme == "w8a8" else 1e-3)


def test_a_model_without_any_parameter_is_saved_scored_and_served(tmp_path: Path) -> None:
    bare = dataclasses.replace(SHAPE, norm="layer", norm_weight=False)  # as OLMo
    small = compress.quantise(Transformer(bare), "w8a16", head="int8", embedding="int8")
    assert not list(small.parameters())
    save_folder(small, tmp_path)
    back = load_folder(tmp_path)
    assert torch.equal(back(TOKENS), small(TOKENS))
    assert TransformerScorer(back).losses(TOKENS[:, :-1], TOKENS[:, 1:]).shape == (2, 23)
    answer = Engine(back).generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0))[0]
    assert answer.completions[0].token_ids == [int(small(torch.tensor([[1, 2, 3]]))[0, -1].argmax())]


def rewrite(folder: Path, settings: dict[str, Any], encode: Any) -> dict[str, Tensor]:
    """Turn a dense folder into a quantised one; return the dense weights that its layers stand for."""
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    meant: dict[str, Tensor] = {}
    for name in [name for name in tensors if "_proj" in name]:
        prefix = name.removesuffix(".weight")
        made, meant[name] = encode(tensors.pop(name))
        tensors |= {f"{prefix}.{suffix}": value.contiguous() for suffix, value in made.items()}
    safetensors_torch.save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return meant


def parts_of(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, scales and zero points of int4 in groups of 32, and the weight that they mean."""
    small = quantise_weight(weight, "int4", group=32, symmetric=False)
    assert small.zeros is not None
    codes, zeros = weight_codes(small).long(), small.zeros.long()
    meant = (codes - zeros.repeat_interleave(32, 1)) * small.scales.repeat_interleave(32, 1)
    return codes, small.scales, zeros, meant


def gptq_parts(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, meant = parts_of(weight)
    index = (torch.arange(weight.shape[1]) // 32).int()
    return {
        "qweight": pack_words(codes.t(), 4, 0),
        "qzeros": pack_words((zeros.t() - 1) & 15, 4, 1),
        "scales": scales.t(),
        "g_idx": index,
    }, meant


def shuffled_gptq_parts(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    made, meant = gptq_parts(weight[:, order])
    back = order.argsort()
    codes = unpack_words(made["qweight"], 4, weight.shape[1], 0)[back]
    return {**made, "qweight": pack_words(codes, 4, 0), "g_idx": made["g_idx"][back]}, meant[:, back]


def awq_parts(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, meant = parts_of(weight)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def pack(numbers: Tensor) -> Tensor:
        return pack_words(numbers.t().unflatten(1, (-1, 8))[..., order].flatten(1), 4, 1)  # type: ignore[no-untyped-call]

    return {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales.t()}, meant


def fp8_parts(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = torch.rand(-(-weight.shape[0] // 48), -(-weight.shape[1] // 48)) * 0.01 + 0.001
    wide = scales.repeat_interleave(48, 0)[: weight.shape[0]].repeat_interleave(48, 1)[:, : weight.shape[1]]
    small = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": small, "weight_scale_inv": scales}, (small.float() * wide).bfloat16().float()


def nf4_parts(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    table = torch.cat((torch.linspace(-1, 0, 8), torch.linspace(0.1, 1, 8)))
    blocks = weight.flatten().unflatten(0, (-1, 64))  # type: ignore[no-untyped-call]
    absmax = blocks.abs().amax(dim=1)
    codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(dim=-1)
    pairs = codes.flatten().unflatten(0, (-1, 2))  # type: ignore[no-untyped-call]
    state = {"shape": list(weight.shape), "blocksize": 64, "dtype": "float32", "quant_type": "nf4"}
    return {
        "weight": (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8)[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }, (table[codes] * absmax[:, None]).view_as(weight)


FORMATS: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq_parts, True),
    "gptq-desc-act": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, shuffled_gptq_parts, False),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq_parts, True),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [48, 48]}, fp8_parts, False),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4_parts, False),
}


@pytest.mark.parametrize("case", FORMATS)
def test_folders_of_other_tools_are_read(model: Transformer, case: str, tmp_path: Path) -> None:
    settings, encode, stays = FORMATS[case]
    save_folder(model, tmp_path)
    meant = rewrite(tmp_path, settings, encode)
    found = load_folder(tmp_path)
    assert any(isinstance(module, QuantisedLinear) for module in found.modules()) == stays
    save_folder(model, tmp_path / "dense")
    tensors = safetensors_torch.load_file(tmp_path / "dense" / "model.safetensors")
    safetensors_torch.save_file({**tensors, **meant}, tmp_path / "dense" / "model.safetensors")
    expected = load_folder(tmp_path / "dense")(TOKENS)
    torch.testing.assert_close(found(TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", FORMATS)
def test_damaged_layers_are_named(model: Transformer, case: str, tmp_path: Path) -> None:
    settings, encode, _ = FORMATS[case]
    save_folder(model, tmp_path)
    rewrite(tmp_path, settings, encode)
    tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
    parts = [name for name in tensors if "layers.0.self_attn.q_proj" in name]
    for name in parts:
        for damaged in (tensors[name][:-1].clone(), tensors[name][:0].clone()):
            safetensors_torch.save_file({**tensors, name: damaged}, tmp_path / "model.safetensors")
            with pytest.raises((InterchangeError, CorruptFileError), match=r"q_proj|qkv"):
                load_folder(tmp_path)
        safetensors_torch.save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "model.safetensors")
        if not name.endswith("g_idx"):  # without it, groups are consecutive
            with pytest.raises(PiledriverError, match="q_proj"):
                load_folder(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptFileError, match="not a complete safetensors"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "hqq"},
        {"quant_method": "gptq", "bits": 3},
        {"quant_method": "awq", "version": "gemv"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": {"dynamic": False}}}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 3}}}},
        {"quant_method": "compressed-tensors", "config_groups": [4]},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": 3}}},
    ],
    ids=str,
)
def test_other_formats_are_rejected_by_name(model: Transformer, settings: dict[str, Any], tmp_path: Path) -> None:
    save_folder(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(InterchangeError, match="not supported"):
        load_folder(tmp_path)
