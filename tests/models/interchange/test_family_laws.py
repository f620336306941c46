"""The laws of a family, for each of tiny random models of transformers that use its every switch.

Same logits as transformers' `sdpa` and `eager` at a length beyond every window and rotary switch; tensors and config
survive loading and saving exactly; same gradients; same greedy continuation, ours with a cache.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from piledriver.models import Transformer
from piledriver.models.decoding import cached_logits, decode, most_likely
from piledriver.models.interchange import load_folder, save_folder
from piledriver.models.interchange.families import family_names
from piledriver.models.model_size import parameter_count
from tests.models.interchange.cases import CASES, VOCAB

transformers = pytest.importorskip("transformers")
# Importing one of its models compiles a function of it with TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

LENGTH, PROMPT, NEW = 33, 18, 6


class Pair(NamedTuple):
    """A model of transformers, its folder, and ours loaded from it."""

    case: str
    theirs: Any
    folder: Path
    ours: Transformer


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model_type, settings = CASES[request.param]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # their initial norms, biases and routers are constants, which would hide a mix-up
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in theirs.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return Pair(request.param, theirs, folder, load_folder(folder))


def near(found: Tensor, wanted: Tensor, tolerance: float, what: str, least: float = 0.0) -> None:
    off = (found - wanted).abs().max().item() / max(wanted.abs().max().item(), least, 1e-30)
    assert off <= tolerance, f"{what} is off by {off:.2e}"


def tensors(folder: Path) -> dict[str, Tensor]:
    return dict(load_file(folder / "model.safetensors"))


def forget_lengths(theirs: Any) -> None:
    """Undo what transformers remembers with dynamic rotary scaling: the longest sequence, until a short one comes."""
    with torch.no_grad():
        theirs(torch.ones(1, 4, dtype=torch.long))


def test_logits_equal_those_of_transformers(pair: Pair) -> None:
    tokens = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = pair.ours(tokens)
        for implementation in ["eager"] + ["sdpa"] * pair.theirs._supports_sdpa:
            pair.theirs.set_attn_implementation(implementation)
            near(ours, pair.theirs(tokens).logits, 1e-5, f"{pair.case} against {implementation}")
    assert parameter_count(pair.ours.config) == sum(parameter.numel() for parameter in pair.ours.parameters())


def test_a_round_trip_is_exact(pair: Pair, tmp_path: Path) -> None:
    before = json.loads((pair.folder / "config.json").read_text())
    save_folder(pair.ours, tmp_path / "again")
    after = json.loads((tmp_path / "again/config.json").read_text())
    assert after == {**dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")), **before}
    kept, stored = tensors(tmp_path / "again"), tensors(pair.folder)
    assert kept.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(kept[name], tensor), name

    # A config of our own, not the one that was read, gives the same model there.
    source, pair.ours.source_config = pair.ours.source_config, None
    try:
        save_folder(pair.ours, tmp_path / "new", model_type=before["model_type"])
    finally:
        pair.ours.source_config = source
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    assert type(back) is type(pair.theirs)
    tokens = torch.randint(3, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        near(back(tokens).logits, pair.theirs(tokens).logits, 1e-5, pair.case)


def test_gradients_of_a_step_are_equal(pair: Pair, tmp_path: Path) -> None:
    tokens = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    forget_lengths(pair.theirs)
    logits = pair.theirs(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    config = pair.ours.config
    if config.moe is not None:  # transformers adds its balance loss only on request
        pair.ours.config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, balance_coefficient=0.0))
    pair.ours(tokens[:, :-1], tokens[:, 1:]).loss.backward()
    pair.ours.config = config
    folders = []
    for name, model, save in (
        ("theirs", pair.theirs, pair.theirs.save_pretrained),
        ("ours", pair.ours, lambda folder: save_folder(pair.ours, folder)),
    ):
        weights = {parameter: parameter.data for parameter in model.parameters()}
        frozen = {buffer: buffer.clone() for key, buffer in model.named_buffers() if key.endswith("correction_bias")}
        for parameter, weight in weights.items():
            parameter.data = torch.zeros_like(weight) if parameter.grad is None else parameter.grad
        for buffer in frozen:
            buffer.zero_()
        save(tmp_path / name)  # under the same names, so that they can be compared
        for parameter, weight in weights.items():
            parameter.data, parameter.grad = weight, None
        for buffer, value in frozen.items():
            buffer.copy_(value)
        folders.append(tensors(tmp_path / name))
    wanted, found = folders
    largest = max(tensor.abs().max().item() for tensor in wanted.values())
    for name, gradient in wanted.items():
        if not name.endswith(("act_fn.beta", "act_fn.eps")):  # constants
            near(found[name], gradient, 2e-5, f"{pair.case} {name}", least=1e-2 * largest)


def test_greedy_continuations_are_equal(pair: Pair) -> None:
    prompts = torch.randint(3, VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(4))
    pair.theirs.generation_config.eos_token_id = None
    forget_lengths(pair.theirs)
    wanted = pair.theirs.generate(
        prompts, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(prompts), pad_token_id=0
    )
    found = decode(cached_logits(pair.ours, 2, PROMPT + NEW), prompts, NEW, most_likely)
    assert found.tolist() == wanted.tolist()


def test_every_family_has_a_case() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(family_names())
