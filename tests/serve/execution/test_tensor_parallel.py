"""Tensor-parallel serving: law 8 over ranks, the same answers as one process, and no process left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from piledriver.core.random import Stream
from piledriver.engine import Layout
from piledriver.engine.apply import apply
from piledriver.engine.mesh import make_mesh
from piledriver.models import ModelConfig, MoEConfig, Transformer
from piledriver.models.interchange import save_folder
from piledriver.serve import Engine, RequestOutput, SamplingParams, ServeError
from piledriver.serve.background import start_server
from piledriver.serve.execution.tensor_parallel.load import load_sharded
from piledriver.serve.load import LoadConfig, run_load
from tests.checkpoint.processes import run
from tests.patience import HANG_S
from tests.serve.http.conftest import make_folder

SHAPE: dict[str, Any] = {
    "vocab_size": 31,
    "dim": 32,
    "layers": 2,
    "heads": 8,
    "kv_heads": 4,
    "mlp_dim": 128,
    "max_positions": 64,
}
MODELS = {
    "dense": (ModelConfig(**SHAPE), torch.bfloat16),
    "experts": (ModelConfig(**SHAPE, moe=MoEConfig(experts=3, experts_per_token=2, expert_dim=128)), torch.float32),
    "alibi": (
        ModelConfig(**{**SHAPE, "kv_heads": 8}, positions="alibi", qk_norm="full", tied=False),
        torch.float32,
    ),
}
PROMPTS = [[5, 6, 7], [1], [9] * 20, [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 3]]
Answer = tuple[list[int], list[float]]


def params(at: int) -> SamplingParams:
    return SamplingParams(max_tokens=4 + at, temperature=(0.0, 0.8)[at % 2], seed=at, logprobs=0, ignore_eos=True)


def answer(output: RequestOutput) -> Answer:
    [completion] = output.completions
    return completion.token_ids, [entry.logprob for entry in completion.logprobs or []]


def alone(engine: Engine) -> list[Answer]:
    return [answer(engine.generate([prompt], params(at))[0]) for at, prompt in enumerate(PROMPTS)]


def scheduled(engine: Engine, stream: Stream) -> list[Answer]:
    """Serve all prompts, each begun at a random step."""
    waiting, ids, done = list(range(len(PROMPTS))), {}, {}
    number = iter(range(10**6))
    while waiting or engine.busy:
        if waiting and stream.below(2, next(number)):
            at = waiting.pop(stream.below(len(waiting), next(number)))
            ids[engine.add_request(PROMPTS[at], params(at))] = at
        for event in engine.step():
            if event.finished:
                done[ids[event.request_id]] = answer(event)
    return [done[at] for at in range(len(PROMPTS))]


def _serve(rank: int, folder: str, size: int) -> dict[str, list[Answer]]:
    found = {}
    for name, (config, dtype) in MODELS.items():
        if name == "dense":
            model = load_sharded(folder, Layout(tp=size), device=torch.device("cpu"), dtype=dtype)
        else:
            model = Transformer(config, seed=3).to(dtype).requires_grad_(False)
            mesh = make_mesh(Layout(tp=size, sequence_parallel=False), "cpu")
            apply(model, mesh, device=torch.device("cpu"))
        engine = Engine(model, deterministic=True, token_budget=8, block_size=4, cache_tokens=128)
        assert engine.runner.cache.keys[0].shape[1] == model.config.kv_heads // size
        if engine.follows:
            engine.follow()
            continue
        found[name] = alone(engine)
        for at in range(2):
            assert scheduled(engine, Stream(at, "schedule")) == found[name]
        with pytest.raises(ServeError, match="several ranks"):
            engine.update_weights(model)
        engine.update_weights()
        assert alone(engine) == found[name]
        engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_serve_what_one_process_serves(size: int, tmp_path: Path) -> None:
    save_folder(Transformer(MODELS["dense"][0], seed=3), tmp_path)
    found = run(size, _serve, str(tmp_path), size)[0]
    for name, (config, dtype) in MODELS.items():
        model = Transformer(config, seed=3).to(dtype).requires_grad_(False)
        near = 1e-4 if dtype == torch.float32 else 5e-2
        for (tokens, logprobs), (their_tokens, theirs) in zip(found[name], alone(Engine(model)), strict=True):
            same = next((i for i, pair in enumerate(zip(tokens, their_tokens, strict=True)) if len(set(pair)) > 1), 99)
            assert same == 99 or dtype == torch.bfloat16
            assert logprobs[:same] == pytest.approx(theirs[:same], abs=near)


@pytest.mark.slow
def test_the_command_serves_over_processes_and_leaves_none(tmp_path: Path) -> None:
    server = start_server(make_folder(tmp_path / "model"), ["--port", "0", "--tp", "2"], log=tmp_path / "log")
    ranks = psutil.Process(server.pid).children(recursive=True)
    result = run_load(server.url, LoadConfig(requests=4, clients=2, prompt_tokens=5, answer_tokens=4))
    assert result.tokens == 16
    assert server.child is not None
    os.kill(server.pid, signal.SIGKILL)
    server.child.wait(HANG_S)
    deadline = time.monotonic() + HANG_S
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert time.monotonic() < deadline, "a rank outlived rank 0"
        time.sleep(0.2)
