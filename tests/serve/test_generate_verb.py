"""`piledriver generate`: streams text, prints JSON, and says what is wrong in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from piledriver.cli.main import main
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import save_folder
from piledriver.serve import SamplingParams, generate
from tests.serve.text.test_detokenizer import byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tokenizer = byte_level(place)
    (place / "byte_level.json").rename(place / "tokenizer.json")
    shape = ModelConfig(vocab_size=tokenizer.vocab_size, dim=128, layers=1, heads=4, mlp_dim=128, max_positions=64)
    model = Transformer(shape)
    torch.nn.init.normal_(model.output_weight(), std=0.3)
    save_folder(model, place)
    return place


def test_a_single_prompt_is_streamed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder), "Hello", "--max-tokens", "8", "--temperature", "0"]) == 0
    streamed = capsys.readouterr().out
    assert main(["generate", str(folder), "Hello", "--max-tokens", "8", "--temperature", "0", "--json"]) == 0
    [answer] = json.loads(capsys.readouterr().out)["answers"]
    assert streamed == f"Hello{answer['text']}\n"
    assert len(answer["tokens"]) == len(answer["logprobs"]) <= 8
    # The prompt begins with the document boundary, as in training.
    tokenizer = open_tokenizer(folder)
    ids = [tokenizer.boundary(), *tokenizer.encode("Hello").tolist()]
    [output] = generate(folder, [ids], SamplingParams(max_tokens=8, temperature=0))
    assert output.completions[0].token_ids == answer["tokens"]


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_weights_can_be_rounded(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(folder), "One", "Two", "-n", "2", "--max-tokens", "4", "--quantise", kind, "--json"]
    words += ["--kv-dtype", "auto" if kind == "int4" else kind]
    assert main(words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["One", "Two"]
    assert all(len(line["answers"]) == 2 for line in lines)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--temperature", "-1"], "temperature is -1"),
        (["--max-tokens", "100"], "at most"),
        (["--top-p", "0"], "top_p is 0"),
    ],
)
def test_mistakes_are_one_line(folder: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder), "Hello", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1
