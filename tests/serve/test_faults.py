"""One failing request hurts no other; a step that does not fit in memory is cut and repeated; nothing leaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from piledriver.core.random import Stream
from piledriver.models import ModelConfig, Transformer
from piledriver.serve import Engine, SamplingParams, ServeError

PARAMS = SamplingParams(max_tokens=6, temperature=0)
PROMPTS = [[1, 2, 3], [4] * 12, list(range(30))]


@pytest.fixture(scope="module")
def model() -> Transformer:
    shape = ModelConfig(vocab_size=61, dim=32, layers=1, heads=4, max_positions=64)
    return Transformer(shape).requires_grad_(False)


class Odd:
    """A constraint that allows odd tokens, and fails in its own way after some tokens."""

    finished = False

    def __init__(self, fails_in: str = "", after: int = 2) -> None:
        self.tokens: list[int] = []
        self._fails_in, self._after = fails_in, after

    def fill_mask(self, mask: Any) -> None:
        self._fail("fill_mask")
        mask[:] = 0x2AAAAAAA

    def accept(self, token: int) -> None:
        self.tokens.append(token)
        self._fail("accept")

    def rollback(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]

    def _fail(self, where: str) -> None:
        if where == self._fails_in and len(self.tokens) >= self._after:
            raise RuntimeError("broken grammar")


@pytest.mark.parametrize("speculate", ["none", "ngram"])
@pytest.mark.parametrize("where", ["fill_mask", "accept"])
def test_a_failing_constraint_ends_its_request_only(model: Transformer, where: str, speculate: Any) -> None:
    expected = [output.completions[0].token_ids for output in Engine(model).generate(PROMPTS, PARAMS)]
    engine = Engine(model, speculate=speculate)
    good = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    odd = engine.add_request([5, 5, 5, 5, 5, 5], PARAMS, constraints=[Odd()])
    bad = engine.add_request([7, 8], PARAMS, constraints=[Odd(where)])
    done = {}
    while engine.busy:
        done |= {event.request_id: event for event in engine.step() if event.finished}
    assert [done[identity].completions[0].token_ids for identity in good] == expected
    assert all(token % 2 for token in done[odd].completions[0].token_ids)
    assert done[bad].completions[0].finish_reason == "error"
    assert "broken grammar" in (done[bad].error or "")
    assert engine.pool.free == engine.pool.count


def test_a_step_that_does_not_fit_is_cut_and_repeated(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [output.completions[0].token_ids for output in Engine(model).generate(PROMPTS, PARAMS)]
    engine = Engine(model)
    usual, tries = engine.runner.forward.hidden, []

    def hidden(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        tries.append(len(tokens))
        if len(tokens) > 10:
            raise torch.OutOfMemoryError("out of memory")
        return usual(tokens, *rest)

    monkeypatch.setattr(engine.runner.forward, "hidden", hidden)
    found = [output.completions[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]
    assert found == expected
    assert max(tries) > 10
    assert engine.scheduler.token_budget <= 10
    assert engine.pool.free == engine.pool.count


def test_a_request_that_never_fits_ends_alone(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model)

    def hidden(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(engine.runner.forward, "hidden", hidden)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [output.error for output in outputs] == ["out of memory"] * 3
    assert engine.pool.free == engine.pool.count


def test_a_broken_engine_says_why(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model)

    def hidden(*_: Any) -> torch.Tensor:
        raise ValueError("device lost")

    monkeypatch.setattr(engine.runner.forward, "hidden", hidden)
    engine.start()
    [output] = engine.generate([PROMPTS[0]], PARAMS)
    assert output.completions[0].finish_reason == "error"
    assert "device lost" in (output.error or "")
    with pytest.raises(ServeError, match="device lost"):
        engine.add_request(PROMPTS[0])
    engine.stop()


def test_requests_that_vanish_at_random_leak_nothing(model: Transformer) -> None:
    engine, numbers = Engine(model, cache_tokens=256), iter(Stream(0, "clients").bits(np.arange(6000)).tolist())
    live: list[str] = []
    for _ in range(300):
        if next(numbers) % 2:
            prompt = [next(numbers) % 61 for _ in range(1 + next(numbers) % 20)]
            live.append(engine.add_request(prompt, SamplingParams(max_tokens=1 + next(numbers) % 30)))
        if live and next(numbers) % 3 == 0:
            engine.abort(live.pop(next(numbers) % len(live)))
        engine.step()
    for identity in live:
        engine.abort(identity)
    engine.step()
    assert not engine.busy
    assert engine.pool.free == engine.pool.count
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
