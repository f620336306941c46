"""DeepSpeed's `init_inference` and MII's pipeline and server: their names, our engine, the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piledriver.compat import deepspeed, mii
from piledriver.core.errors import PiledriverError, UsageError
from piledriver.models.interchange import load_folder
from piledriver.serve import SamplingParams, generate
from tests.serve.http.conftest import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("doors") / "tiny")


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    [output] = generate(folder, [prompt], SamplingParams(max_tokens=count, temperature=0))
    return list(output.completions[0].token_ids)


def test_init_inference_generates_what_the_engine_does(folder: Path) -> None:
    settings = {"dtype": "fp32", "replace_with_kernel_inject": True, "tensor_parallel": {"tp_size": 1}}
    engine = deepspeed.init_inference(str(folder), config=settings, kernel_inject=True, max_tokens=64)
    prompts = torch.tensor([[5, 6, 7], [8, 9, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    found = engine.generate(prompts, attention_mask=mask, max_new_tokens=4)
    assert found[0].tolist() == [5, 6, 7, *greedy(folder, [5, 6, 7], 4)]
    assert found[1, :6].tolist() == [8, 9, *greedy(folder, [8, 9], 4)]
    engine.profile_model_time()
    assert torch.equal(engine(prompts), load_folder(folder)(prompts))
    assert len(engine.model_times()) == 1


@pytest.mark.parametrize(
    ("config", "kwargs", "said"),
    [
        ({"dtyp": "fp16"}, {}, "did you mean 'dtype'"),
        ({"dtype": "fp12"}, {}, "dtype is 'fp12'"),
        ({"dtype": "fp16"}, {"dtype": "fp32"}, "dtype is given twice"),
        ({}, {"dtype": torch.int8}, "int8"),
        ({"tp": {"tp_size": 2}}, {}, "tensor_parallel is 2"),
        ({"quant": {"enabled": True}}, {}, "quant of init_inference is not supported"),
        ({"zero": {"stage": 3}}, {}, "zero of init_inference is not supported"),
    ],
)
def test_what_would_change_answers_is_rejected(config: dict[str, Any], kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        deepspeed.init_inference("nowhere", config=config, **kwargs)


def test_a_pipeline_of_mii(folder: Path) -> None:
    pipe = mii.pipeline(str(folder), zmq_port_number=25555)
    [one, two] = pipe(["The quick", "Once"], max_new_tokens=5, do_sample=False, return_full_text=True)
    assert one.generated_text.startswith("The quick")
    assert (two.generated_length, two.finish_reason) == (5, "length")
    with pytest.raises(UsageError, match="did you mean 'max_new_tokens'"):
        pipe("a", max_new_token=5)
    with pytest.raises(UsageError, match="tensor_parallel is 2"):
        mii.pipeline(str(folder), tensor_parallel=2)
    pipe.destroy()
    with pytest.raises(UsageError, match="was destroyed"):
        pipe("a")


@pytest.mark.slow
def test_a_server_of_mii_is_found_by_its_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started = mii.serve(str(folder), deployment_name="house")
    try:
        wish = {"max_new_tokens": 6, "do_sample": False, "ignore_eos": True}
        [whole] = mii.client("house").generate("Once upon", **wish)
        pieces: list[str] = []
        streamed = started.generate("Once upon", lambda parts: pieces.append(parts[0].generated_text), **wish)
        assert "".join(pieces) == whole.generated_text == streamed[0].generated_text
        assert whole.generated_length == 6
        with pytest.raises(PiledriverError, match="top_p is 5"):
            started.generate("a", top_p=5)
    finally:
        started.terminate_server()
    with pytest.raises(UsageError, match="no deployment is named 'house'"):
        mii.client("house")
    with pytest.raises(PiledriverError, match="does not answer"):
        started.generate("a")
    with pytest.raises(PiledriverError, match="did not start"):
        mii.serve(str(tmp_path / "nothing"))
