"""On a GPU: a real lack of memory is survived; early launches and prefill graphs change no bit."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from piledriver.models import ModelConfig, Transformer
from piledriver.models.quantised import quantise_linears
from piledriver.serve import Engine, SamplingParams
from tests.patience import HANG_S

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def make(**shape: Any) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "dim": 256, "layers": 2, "heads": 4, "kv_heads": 2, "max_positions": 2048, **shape}
    model = Transformer(ModelConfig(**sizes)).to("cuda", torch.bfloat16).requires_grad_(False)
    torch.nn.init.normal_(model.output_weight(), std=0.2)
    return model


def answers(engine: Engine, prompts: list[list[int]], new: int) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, logprobs=0)
    done = [output.completions[0] for output in engine.generate(prompts, params)]
    return [(one.token_ids, [entry.logprob for entry in one.logprobs or []]) for one in done]


def test_a_step_that_does_not_fit_on_the_device_is_survived() -> None:
    model = make(mlp_dim=8192)
    settings: dict[str, Any] = {"deterministic": True, "cache_tokens": 8192, "prefix_cache": False}
    prompts = torch.randint(512, (6, 1000)).tolist()
    expected = answers(Engine(model, **settings), prompts, 8)
    gc.collect()
    engine = Engine(model, **settings)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    # The MLP of 6,000 tokens needs 94 MiB for its activation alone.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        found = answers(engine, prompts, 8)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.scheduler.token_budget < 6000
    assert found == expected
    assert engine.pool.free == engine.pool.count


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_that_was_prepared_answers_the_same(deterministic: bool) -> None:
    model, done = make(), threading.Event()
    settings: dict[str, Any] = {"cache_tokens": 4096, "max_sequences": 9, "deterministic": deterministic}
    prompts = torch.randint(512, (5, 40)).tolist()
    expected = answers(Engine(model, **settings), prompts, 24)
    engine = Engine(model, **settings)
    engine.start(prepare=True, on_prepared=done.set)
    assert done.wait(HANG_S)
    assert engine.failure is None
    found = answers(engine, prompts, 24)
    engine.stop()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert engine.pool.free == engine.pool.count


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_early_launches_change_no_bit(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from piledriver.kernels import early_launch

    model = make() if kind == "bf16" else quantise_linears(make(), kind, head="int8")
    prompts = torch.randint(512, (1, 40)).tolist()
    early = answers(Engine(model, cache_tokens=2048), prompts, 24)
    monkeypatch.setattr(early_launch, "_SUPPORTED", False)
    early_launch.starts_early.cache_clear()
    try:
        assert not early_launch.starts_early(torch.device("cuda"))
        assert answers(Engine(model, cache_tokens=2048), prompts, 24) == early
    finally:
        early_launch.starts_early.cache_clear()


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_int8_cache_changes_log_probabilities_little(deterministic: bool) -> None:
    model = make()
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=0)
    prompts = torch.randint(512, (3, 200)).tolist()
    settings: dict[str, Any] = {"cache_tokens": 4096, "deterministic": deterministic, "prefix_cache": False}
    exact, small = (Engine(model, kv_dtype=kind, **settings) for kind in ("auto", "int8"))
    for expected, found in zip(exact.generate(prompts, params), small.generate(prompts, params), strict=True):
        first, other = (output.completions[0].logprobs or [] for output in (expected, found))
        assert other[0].logprob == pytest.approx(first[0].logprob, abs=0.1)
    if deterministic:  # prefilled or decoded, alone or together: a token is stored in the same way
        whole = answers(small, prompts, 24)
        for prompt, (tokens, logprobs) in zip(prompts, whole, strict=True):
            again = answers(small, [[*prompt, *tokens[:9]]], 15)[0]
            assert again == (tokens[9:], logprobs[9:])


def test_constrained_answers_are_the_same_with_and_without_graphs() -> None:
    from tests.serve.execution.test_masked_sampling import Only

    model = make()
    found = []
    for graphs in (True, False):
        engine = Engine(model, cache_tokens=2048, deterministic=True, cuda_graphs=graphs)
        for _ in range(3):  # eager, captured, replayed
            ids = [
                engine.add_request([1, 2, 3], SamplingParams(max_tokens=9, seed=at), constraints=held)
                for at, held in enumerate(([Only([5, 6, 7])], [], [Only([500])]))
            ]
            done = {}
            while engine.busy:
                done |= {event.request_id: event for event in engine.step() if event.finished}
            found.append([done[name].completions[0].token_ids for name in ids])
            assert set(found[-1][0]) <= {5, 6, 7}
            assert found[-1][2] == [500] * 9
    assert all(one == found[0] for one in found)
