"""A padded prefill computes what the module computes, and samples the same token."""

from __future__ import annotations

import pytest
import torch

from piledriver.models import ModelConfig, Transformer
from piledriver.serve.execution.fused import FusedForward
from piledriver.serve.execution.inputs import BlockTables, step_inputs
from piledriver.serve.execution.pages import PagedCache
from piledriver.serve.execution.prefill_graphs import PrefillGraphs
from piledriver.serve.execution.sampler import AnswerSampler
from piledriver.serve.request import SamplingParams
from piledriver.serve.scheduling.blocks import BlockPool
from piledriver.serve.scheduling.scheduler import Scheduler
from piledriver.serve.scheduling.sequence import Sequence


@torch.no_grad()
@pytest.mark.parametrize("length", [5, 32, 45])
def test_padding_changes_nothing(length: int) -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=61, dim=32, layers=2, heads=4, kv_heads=2, max_positions=64))
    cache = PagedCache(model.config, 8, 16, length=64, device=torch.device("cpu"), dtype=torch.float32)
    tables, last = BlockTables(2, 4, cache.scratch_block), torch.zeros(3, dtype=torch.int64)
    scheduler = Scheduler(BlockPool(8, 16), token_budget=64, max_sequences=2, prefix_cache=False)
    prompt = torch.randint(61, (length,)).tolist()
    scheduler.add(Sequence(number=0, tokens=prompt, prompt_length=length, limit=64, priority=0, salt="", reuse=True))
    step = scheduler.schedule()
    assert tables.update(step.chunks[0].sequence)
    device_tables = torch.from_numpy(tables.array.copy())
    graphs = PrefillGraphs(
        FusedForward(model, cache, invariant=False), cache, tables, device_tables, last, invariant=False
    )
    inputs = step_inputs(step)
    assert graphs.fits(inputs, [AnswerSampler(SamplingParams(temperature=0), 0)])
    assert not graphs.fits(inputs, [AnswerSampler(SamplingParams(temperature=0, prompt_logprobs=1), 0)])
    logits, drawn, _ = graphs.run(inputs, 0.0, 0.0)
    expected = model(torch.tensor([prompt]))[0, -1]
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)
    assert drawn.tokens.tolist() == [int(expected.argmax())]
    assert int(last[step.chunks[0].sequence.slot]) == int(expected.argmax())
