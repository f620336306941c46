"""Law 8: a request's tokens and log-probabilities do not depend on the other requests, the cache or the schedule.

In deterministic mode they are bitwise those of the same request alone, and of the training module with the same tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from piledriver.core.random import Stream
from piledriver.models import ModelConfig, MoEConfig, Transformer
from piledriver.serve import Engine, RequestOutput, SamplingParams, deterministic

SHAPE = {"vocab_size": 31, "dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "mlp_dim": 32, "max_positions": 64}
MODELS = {
    "grouped": ModelConfig(**{**SHAPE, "layers": 2}),
    "windowed": ModelConfig(
        **{**SHAPE, "layers": 2},
        sliding_window=9,
        full_attention_layers=(1,),
        attention_softcap=5.0,
        qk_norm="head",
        norm_placement="post",
    ),
    "alibi": ModelConfig(**{**SHAPE, "kv_heads": 4}, positions="alibi", norm="layer", mlp="plain", activation="gelu"),
    "experts": ModelConfig(**SHAPE, moe=MoEConfig(experts=3, experts_per_token=2)),
}
# (model, dtype, schedules): 200 in all.
CASES = [
    ("grouped", torch.float32, 60),
    ("grouped", torch.bfloat16, 60),
    ("windowed", torch.float32, 20),
    ("windowed", torch.bfloat16, 20),
    ("alibi", torch.bfloat16, 20),
    ("experts", torch.float32, 20),
]

Result = list[tuple[list[int], list[float]]]


@dataclass(frozen=True)
class Asked:
    """A request of the pool from which schedules are drawn."""

    prompt: tuple[int, ...]
    params: SamplingParams


def pool(stream: Stream) -> list[Asked]:
    shared = [stream.below(31, 1000 + i) for i in range(24)]
    asked = []
    for at in range(7):
        own = [stream.below(31, 100 * at + i) for i in range(1 + stream.below(12, 5000 + at))]
        prompt = (*(shared[: 8 * (at % 4)]), *own)
        params = SamplingParams(
            max_tokens=2 + at // 2,
            temperature=(0.0, 1.0, 0.7)[at % 3],
            top_k=(0, 5)[at % 2],
            top_p=(1.0, 0.9)[at // 2 % 2],
            seed=at,
            n=2 if at == 3 else 1,
            frequency_penalty=0.5 if at == 5 else 0.0,
            logprobs=0,
            prompt_logprobs=0 if at == 4 else None,
        )
        asked.append(Asked(prompt, params))
    return asked


def result(output: RequestOutput) -> Result:
    found = [(c.token_ids, [entry.logprob for entry in c.logprobs or []]) for c in output.completions]
    if output.prompt_logprobs is not None:
        found.append(([], [entry.logprob for entry in output.prompt_logprobs if entry is not None]))
    return found


@functools.cache
def baseline(name: str, dtype: torch.dtype, device: str) -> tuple[Transformer, list[Asked], list[Result]]:
    model = Transformer(MODELS[name]).to(device, dtype).requires_grad_(False)
    asked = pool(Stream(0, "requests"))
    # One request at a time, with nothing in the cache.
    engine = Engine(model, deterministic=True, cache_tokens=512, prefix_cache=False)
    alone = [result(engine.generate([a.prompt], a.params)[0]) for a in asked]
    return model, asked, alone


Below = Callable[[int], int]


def draws(stream: Stream) -> Below:
    """A function that returns the next random number below a bound."""
    number = iter(range(10**6))
    return lambda bound: stream.below(bound, next(number))


def make_engine(model: Transformer, below: Below) -> Engine:
    return Engine(
        model,
        deterministic=True,
        draft_model=model,
        token_budget=(3, 7, 16, 64)[below(4)],
        block_size=(4, 8, 16)[below(3)],
        cache_tokens=(64, 96, 1024)[below(3)],
        max_sequences=(2, 5, 64)[below(3)],
        prefix_cache=below(4) > 0,
        speculate=("none", "ngram", "draft")[below(3)],
        speculate_tokens=1 + below(4),
    )


def run_schedule(engine: Engine, asked: list[Asked], alone: list[Result], stream: Stream, below: Below) -> None:
    """Serve a random choice of requests in a random order, and compare each with itself alone."""
    waiting = stream.shuffled([*range(len(asked)), *range(len(asked))])[: 2 + below(4)]
    ids: dict[str, int] = {}
    cancelled: list[str] = []
    done: dict[str, RequestOutput] = {}
    while waiting or engine.busy:
        for _ in range(1 + below(3)):
            if waiting:
                at = waiting.pop()
                ids[engine.add_request(asked[at].prompt, asked[at].params)] = at
        if below(12) == 0:
            other = engine.add_request(asked[below(7)].prompt, SamplingParams(max_tokens=9, temperature=2.0))
            cancelled.append(other)
        if cancelled and below(3) == 0:
            engine.abort(cancelled.pop())
        done |= {event.request_id: event for event in engine.step() if event.finished}
        if not waiting and cancelled:
            engine.abort(cancelled.pop())
    assert {ids[identity] for identity in ids} == {ids[identity] for identity in done if identity in ids}
    for identity, at in ids.items():
        assert result(done[identity]) == alone[at]
    assert engine.pool.free == engine.pool.count


@pytest.mark.parametrize(("name", "dtype", "schedules"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_a_request_is_served_the_same_under_every_schedule(name: str, dtype: torch.dtype, schedules: int) -> None:
    model, asked, alone = baseline(name, dtype, "cpu")
    for at in range(schedules):
        stream = Stream(at, "schedule", name)
        below = draws(stream)
        run_schedule(make_engine(model, below), asked, alone, stream, below)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_are_those_of_the_training_module(name: str, dtype: torch.dtype) -> None:
    check_teacher_forced(*baseline(name, dtype, "cpu"))


def check_teacher_forced(model: Transformer, asked: list[Asked], alone: list[Result]) -> None:
    device = next(model.parameters()).device
    with deterministic(model):
        for request, answers in zip(asked, alone, strict=True):
            for tokens, logprobs in answers:
                if not tokens:
                    continue
                row = torch.tensor([[*request.prompt, *tokens]], device=device)
                losses = model(row[:, :-1], row[:, 1:], reduction="none")[0, len(request.prompt) - 1 :]
                assert (-losses).tolist() == logprobs


# (model, schedules) on a GPU: 200 in all. Only the first has fused kernels.
GPU_CASES = [("grouped", 140), ("windowed", 20), ("alibi", 20), ("experts", 20)]
# Engines of the GPU, kept for all schedules: each one compiles kernels and captures graphs of its own.
GPU_ENGINES: list[dict[str, Any]] = [
    {"block_size": 16, "cache_tokens": 1024},
    {"block_size": 4, "cache_tokens": 64, "speculate": "ngram"},
    {"block_size": 16, "cache_tokens": 96, "speculate": "draft", "speculate_tokens": 2},
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "schedules"), GPU_CASES)
def test_the_law_holds_on_a_gpu(name: str, schedules: int) -> None:
    model, asked, alone = baseline(name, torch.bfloat16, "cuda")
    check_teacher_forced(model, asked, alone)
    engines = [Engine(model, deterministic=True, draft_model=model, **settings) for settings in GPU_ENGINES]
    for at in range(schedules):
        stream = Stream(at, "schedule", name)
        below = draws(stream)
        engine = engines[below(len(engines))]
        engine.scheduler.token_budget = (3, 7, 16, 64)[below(4)]
        engine.scheduler.max_sequences = (2, 5, 64)[below(3)]
        engine.scheduler.prefix_cache = below(4) > 0
        run_schedule(engine, asked, alone, stream, below)
