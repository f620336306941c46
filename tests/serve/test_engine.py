"""The engine: what it generates is what the model says, however the steps are cut."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from piledriver.models import ModelConfig, Transformer
from piledriver.serve import Engine, EngineConfig, RequestError, RequestOutput, SamplingParams, ServeError, generate
from piledriver.serve.execution import build
from tests.patience import HANG_S

PROMPTS = [[1, 2, 3], [4] * 20, list(range(33))]


@pytest.fixture(scope="module")
def model() -> Transformer:
    shape = ModelConfig(vocab_size=61, dim=32, layers=2, heads=4, kv_heads=2, max_positions=64)
    return Transformer(shape).requires_grad_(False)


@pytest.fixture(scope="module")
def greedy(model: Transformer) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        for _ in range(8):
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
        found.append(tokens[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"deterministic": True},
        {"token_budget": 7},
        {"cache_tokens": 64, "token_budget": 16},
        {"prefix_cache": False, "block_size": 4},
        {"speculate": "ngram"},
        {"speculate": "draft"},
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_the_forward_without_a_cache(
    model: Transformer, greedy: list[list[int]], settings: dict[str, Any]
) -> None:
    engine = Engine(model, draft_model=model, **settings)
    outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0))
    assert [output.completions[0].token_ids for output in outputs] == greedy
    assert engine.pool.free == engine.pool.count


@pytest.mark.parametrize(("kv_dtype", "near"), [("int8", 0.02), ("fp8", 0.2)])
def test_a_cache_of_eight_bits_stays_near_the_model_whatever_else_is_served(
    model: Transformer, kv_dtype: Any, near: float
) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=0, prompt_logprobs=0)
    alone = [Engine(model, deterministic=True, kv_dtype=kv_dtype).generate([one], params)[0] for one in PROMPTS]
    engine = Engine(model, deterministic=True, kv_dtype=kv_dtype, token_budget=7, block_size=4)
    together = engine.generate([*PROMPTS, *PROMPTS], params)
    for output, same in zip(together, [*alone, *alone], strict=True):
        assert output.completions == same.completions
        assert output.prompt_logprobs == same.prompt_logprobs
    tokens = torch.tensor([PROMPTS[2]])
    expected = model(tokens)[0].log_softmax(-1)
    for at, entry in enumerate(alone[2].prompt_logprobs[1:] if alone[2].prompt_logprobs else [], start=1):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[at - 1, tokens[0, at]]), abs=near)


def test_a_sample_depends_on_the_seed_and_the_position_only(model: Transformer) -> None:
    def draw(prompts: list[list[int]], tokens: int, seed: int) -> list[int]:
        params = SamplingParams(max_tokens=tokens, seed=seed, top_k=50, temperature=0.8)
        return generate(model, prompts, params)[0].completions[0].token_ids

    alone = draw([PROMPTS[0]], 8, 3)
    assert draw([PROMPTS[0], *PROMPTS], 8, 3) == alone
    assert draw([PROMPTS[0]], 4, 3) == alone[:4]
    assert draw([PROMPTS[0]], 8, 4) != alone


def test_log_probabilities_are_those_of_the_model(model: Transformer) -> None:
    params = SamplingParams(max_tokens=5, seed=1, logprobs=3, prompt_logprobs=2, n=2)
    for settings in ({}, {"token_budget": 5}):
        [output] = Engine(model, **settings).generate([PROMPTS[2]], params)
        for completion in output.completions:
            tokens = torch.tensor([[*PROMPTS[2], *completion.token_ids]])
            expected = model(tokens)[0].log_softmax(-1)
            answer = completion.logprobs or []
            for found, place in ((output.prompt_logprobs or [], 0), ([None, *answer], len(PROMPTS[2]) - 1)):
                assert len(found) > 5
                assert found[0] is None
                for at, entry in enumerate(found[1:], start=place):
                    assert entry is not None
                    assert entry.token == tokens[0, at + 1]
                    assert entry.logprob == pytest.approx(float(expected[at, entry.token]), abs=1e-5)
                    best = expected[at].topk(len(entry.top))
                    assert [token for token, _ in entry.top] == best.indices.tolist()
        assert output.completions[0].token_ids != output.completions[1].token_ids


def test_a_cancelled_request_frees_its_blocks_at_once(model: Transformer) -> None:
    engine = Engine(model)
    kept = engine.add_request([1, 2, 3], SamplingParams(max_tokens=6, temperature=0))
    gone = engine.add_request(list(range(40)), SamplingParams(max_tokens=20))
    engine.step()
    engine.abort(gone)
    events = engine.step()
    assert [event.request_id for event in events if event.finished] == [gone]
    assert engine.pool.count - engine.pool.free == 1
    while engine.busy:
        events = engine.step()
    assert events[-1].request_id == kept
    assert engine.pool.free == engine.pool.count


def test_a_thread_serves_requests_of_other_threads(model: Transformer, greedy: list[list[int]]) -> None:
    engine = Engine(model)
    engine.start()
    try:
        params = SamplingParams(max_tokens=8, temperature=0)
        events = list(engine.stream(PROMPTS[1], params))
        assert [token for event in events for delta in event.deltas for token in delta.token_ids] == greedy[1]
        outputs = engine.generate(PROMPTS, params)
        assert [output.completions[0].token_ids for output in outputs] == greedy
        stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=60))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert engine.generate([PROMPTS[0]], params)[0].completions[0].token_ids == greedy[0]
    finally:
        engine.stop()
    assert engine.pool.free == engine.pool.count


def test_new_weights_serve_from_the_next_step_on(model: Transformer) -> None:
    other = Transformer(model.config, seed=1)
    served = Transformer(model.config, seed=0)
    engine = Engine(served)
    params = SamplingParams(max_tokens=8, temperature=0)
    engine.generate([PROMPTS[2]], params)
    engine.update_weights(other)
    assert engine.generate([PROMPTS[2]], params)[0].completions == generate(other, [PROMPTS[2]], params)[0].completions


def test_best_of_returns_the_most_likely_answers(model: Transformer) -> None:
    drawn = generate(model, [[1, 2]], SamplingParams(max_tokens=4, n=4))[0].completions
    [best] = generate(model, [[1, 2]], SamplingParams(max_tokens=4, n=1, best_of=4))[0].completions
    assert best.cumulative_logprob == max(completion.cumulative_logprob for completion in drawn)


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], {}, "prompt is empty"),
        ([61], {}, "prompt has token 61"),
        ([1] * 60, {"max_tokens": 10}, "at most 4 tokens"),
        ([1], {"stop": ("x",)}, "tokenizer"),
    ],
)
def test_requests_that_cannot_be_served_are_rejected(
    model: Transformer, prompt: list[int], params: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        Engine(model).add_request(prompt, SamplingParams(**params))


@pytest.mark.parametrize("name", ["temperature", "top_p", "n", "max_tokens", "top_k", "min_p", "logprobs"])
def test_parameters_out_of_range_are_rejected(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: -1})


def test_a_device_without_room_for_a_context_is_an_error_with_its_arithmetic(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, cpu = EngineConfig(max_context=64), torch.device("cpu")
    with pytest.raises(ServeError, match=r"takes .* of cache; cache_tokens 32 gives .*max_context to at most 32"):
        Engine(model, max_context=64, cache_tokens=32)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    with pytest.raises(ServeError, match=r"has 1\.00 GiB free of 80\.00 GiB.* free memory on the device"):
        build.cache_blocks(model, settings, 64, torch.float32, torch.device("cuda"), 1)
    assert build.cache_blocks(model, settings, 64, torch.float32, cpu, 1) == 64


def test_a_seen_prompt_is_found_in_the_cache(model: Transformer) -> None:
    engine = Engine(model)
    params = SamplingParams(max_tokens=2)

    def cached(prompt: list[int], salt: str = "") -> int:
        found: list[RequestOutput] = list(engine.stream(prompt, params, cache_salt=salt))
        return found[-1].cached_tokens

    assert cached(PROMPTS[2]) == 0
    assert cached(PROMPTS[2]) == 32
    assert cached(PROMPTS[2], salt="another user") == 0
    assert cached([*PROMPTS[2][:16], 60]) == 16


@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_every_step_launches_the_next_before_the_last_is_read(model: Transformer, penalty: float) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    params = SamplingParams(max_tokens=40, temperature=0.5, ignore_eos=True, frequency_penalty=penalty)
    expected = [output.completions[0].token_ids for output in Engine(model).generate(prompts, params)]
    engine = Engine(model)
    engine._steps._overlap = True
    for prompt in prompts:
        engine.add_request(prompt, params)
    steps, found = 0, {}
    while engine.busy:
        steps += 1
        found |= {event.request_id: event.completions[0].token_ids for event in engine.step() if event.finished}
    assert list(found.values()) == expected
    assert steps <= 42  # one a token, and one to read the last


def test_a_preparation_that_fails_is_given_up(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, done = Engine(model), threading.Event()

    def fails() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(engine.runner, "preparations", lambda: iter([fails, fails]))
    engine.start(prepare=True, on_prepared=done.set)
    assert done.wait(HANG_S)
    [output] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.stop()
    assert engine.failure is None
    assert len(output.completions[0].token_ids) == 2


def test_an_engine_that_stopped_refuses_instead_of_waiting(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Transformer(model.config))

    def fails(_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._steps, "swap_weights", fails)
    engine.start()
    for _ in range(2):  # while it fails, and afterwards
        with pytest.raises(ServeError, match="has stopped: device lost"):
            engine.update_weights()
    with pytest.raises(ServeError, match="has stopped: device lost"):
        engine.generate([PROMPTS[0]])
    engine.stop()
