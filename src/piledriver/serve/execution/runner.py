"""The runner: a scheduled step to sampled tokens. Launching does not wait for the device; reading does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from piledriver.kernels.compile_ahead import CompiledAhead
from piledriver.kernels.paged_attention import PagedBatch
from piledriver.kernels.sampling import Drawn
from piledriver.models import Transformer
from piledriver.serve.execution.forward import Forward
from piledriver.serve.execution.fused import FusedForward
from piledriver.serve.execution.graphs import DecodeGraphs, DecodeResult
from piledriver.serve.execution.inputs import BlockTables, SampleRow, StepInputs, step_inputs
from piledriver.serve.execution.masked_sampling import MaskedSampling
from piledriver.serve.execution.pages import PagedCache
from piledriver.serve.execution.prefill_graphs import PREFILL_SIZES, PrefillGraphs
from piledriver.serve.execution.sampler import ALMOST_ONE, AnswerSampler, Sampled, prompt_logprobs, sample
from piledriver.serve.request import SamplingParams, TokenLogprob
from piledriver.serve.scheduling.scheduler import Step
from piledriver.serve.scheduling.sequence import Sequence

_PROMPT_ROWS = 64


@dataclass(slots=True)
class Launched:
    """A step that runs on the device, or has run."""

    step: Step
    samples: list[SampleRow]
    host: Drawn | None = None
    """Tokens and log-probabilities, or where they will be once `ready`."""
    tops: list[list[tuple[int, float]] | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """By the number of the sequence: log-probabilities of the prompt tokens after those of this step."""
    failures: dict[int, str] = field(default_factory=dict)
    """Rows whose own settings failed, with the reason."""
    ready: Any = None


class Forwarded(NamedTuple):
    """A step whose forward pass was launched."""

    step: Step
    samples: list[SampleRow]
    slots: Any
    """Rows of the tables; a sequence that ends meanwhile has none any more."""
    answers: list[AnswerSampler]
    logits: Tensor | None
    """[samples, vocab]; None if nothing is sampled."""
    drawn: Drawn | None
    """Tokens sampled by temperature alone inside a CUDA graph, padded."""
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}  # noqa: RUF012 - never changed
    decoded: DecodeResult | None = None
    """The whole result of a CUDA graph of a decode step."""


class Runner:
    """Runs steps on one device."""

    def __init__(
        self,
        model: Transformer,
        forward: Forward,
        cache: PagedCache,
        tables: BlockTables,
        *,
        invariant: bool,
        graphs: bool = False,
    ) -> None:
        self.model, self.forward, self.cache, self.tables, self.invariant = model, forward, cache, tables, invariant
        self.device = cache.keys[0].device
        self._last_tokens = torch.zeros(len(tables.array), dtype=torch.int64, device=self.device)
        self._tables = torch.from_numpy(tables.array.copy()).to(self.device)
        self._graphs: DecodeGraphs | None = None
        self._masked: MaskedSampling | None = None
        if graphs:
            self._graphs = DecodeGraphs(
                forward,
                self._tables,
                self._last_tokens,
                block_size=cache.block_size,
                max_context=cache.length,
                max_sequences=len(tables.array) - 1,
                padding_slot=tables.padding_slot,
                invariant=invariant,
            )
            self._masked = MaskedSampling(self._graphs.inputs, self._last_tokens)
        self._prefill_graphs: PrefillGraphs | None = None
        if graphs and isinstance(forward, FusedForward):
            self._prefill_graphs = PrefillGraphs(
                forward, cache, tables, self._tables, self._last_tokens, invariant=invariant
            )
        self._compiling: dict[int, CompiledAhead] = {}
        """Kernels of the first steps by the number of their tokens: 1 for a decode step."""

    @torch.inference_mode()
    def compile_first_steps(self) -> None:
        """Start compiling what one request with a short prompt needs, in threads; weights may be loaded meanwhile."""
        if self._graphs is None or self._prefill_graphs is None:
            return
        # In the order of the threads' work: a longer prompt, its answer, shorter prompts. 256 tokens need what 128 do.
        prefill = self._prefill_graphs
        self._compiling[128] = prefill.compile_ahead(self._padding_inputs(0, 128))
        self._compiling[1] = self._graphs.compile_ahead(1)
        for tokens in (32, 64):
            self._compiling[tokens] = prefill.compile_ahead(self._padding_inputs(0, tokens))

    def _finish_compiling(self, tokens: int) -> None:
        """Wait for the kernels of a step of so many tokens."""
        if self._compiling:
            size = next((size for size in (1, 32, 64) if size >= tokens), 128)
            if size in self._compiling:
                self._compiling.pop(size).wait()

    def preparations(self) -> Iterator[Callable[[], Any]]:
        """Yield what requests will need, in short parts for `prepare`: kernels to compile, graphs to capture."""
        if self._graphs is None:
            return
        graphs = self._graphs
        for size in graphs.sizes:
            yield functools.partial(graphs.prepare, size)
        # Steps that prefill: one long prompt; beside a few answers; beside many. Their kernels share a context or not.
        for decoding, prompt in ((0, 300), (20, 128), (len(self.tables.array) - 2, 1024)):
            yield functools.partial(self._prepare_prefill, decoding, prompt)
        if self._prefill_graphs is not None:
            for size in PREFILL_SIZES:
                for _ in range(2):  # compiled, then captured
                    yield functools.partial(self._prefill_graphs.run, self._padding_inputs(0, size), 0.0, 0.0)

    @torch.inference_mode()
    def prepare(self, part: Callable[[], Any]) -> None:
        """Run one of `preparations`, as a step would."""
        while self._compiling:
            self._compiling.popitem()[1].wait()
        part()

    def _prepare_prefill(self, decoding: int, prompt: int) -> None:
        inputs = self._padding_inputs(decoding, prompt)
        logits = self.forward.logits(self._hidden(inputs))
        sample(logits, inputs.samples, [AnswerSampler(SamplingParams(), 0)] * len(inputs.samples))

    def _padding_inputs(self, decoding: int, prompt: int) -> StepInputs:
        """Return a step of this many decoding sequences and one prompt, all of them padding in the scratch block."""
        prompt = min(prompt, self.cache.length)
        counts = np.array([1] * decoding + [prompt], dtype=np.int32)
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        nobody = Sequence(number=-1, tokens=[0], prompt_length=1, limit=1)
        return StepInputs(
            tokens=np.zeros(starts[-1], dtype=np.int32),
            from_slot=np.full(starts[-1], -1, dtype=np.int32),
            positions=np.concatenate([np.zeros(decoding, np.int32), np.arange(prompt, dtype=np.int32)]),
            slots=np.full(len(counts), self.tables.padding_slot, dtype=np.int32),
            starts=starts,
            contexts=counts,
            rows=starts[1:] - 1,
            samples=[SampleRow(nobody, 0)] * len(counts),
            spans=tuple((int(count), int(count)) for count in counts),
        )

    def launch(self, step: Step) -> Launched:
        """Start a step; on a GPU this returns before it is done."""
        return self.launch_sampling(self.launch_forward(step))

    @torch.inference_mode()
    def launch_forward(self, step: Step) -> Forwarded:
        """Start the forward pass of a step; tokens that the host has not read yet may be among its inputs."""
        self._finish_compiling(sum(chunk.size for chunk in step.chunks))
        changed = [chunk.sequence for chunk in step.chunks if self.tables.update(chunk.sequence)]
        if changed:
            slots = np.array([sequence.slot for sequence in changed])
            width = max([len(sequence.blocks) for sequence in changed])
            self._tables[self._send(slots), :width] = self._send(self.tables.array[slots, :width])
        inputs = step_inputs(step)
        slots = np.array([row.sequence.slot for row in inputs.samples], dtype=np.int64)
        answers = [_answer(row.sequence) for row in inputs.samples]
        if self._graphs is not None and self._graphs.fits(inputs):
            temperatures = [answer.params.temperature for answer in answers]
            uniforms = [
                0.0 if temperature == 0 else min(answer.uniform(row.place), ALMOST_ONE)
                for temperature, answer, row in zip(temperatures, answers, inputs.samples, strict=True)
            ]
            result = self._graphs.run(inputs, temperatures, uniforms)
            found = result.logits[: len(answers)]
            return Forwarded(step, inputs.samples, slots, answers, found, result.drawn, decoded=result)
        if self._prefill_graphs is not None and self._prefill_graphs.fits(inputs, answers):
            uniform = min(answers[0].uniform(inputs.samples[0].place), ALMOST_ONE)
            result = self._prefill_graphs.run(inputs, answers[0].params.temperature, uniform)
            return Forwarded(step, inputs.samples, slots, answers, result.logits, result.drawn)
        scored = [chunk for chunk in step.chunks if _answer(chunk.sequence).params.prompt_logprobs is not None]
        hidden = self._hidden(inputs, every=bool(scored))
        prompts = self._prompt_logprobs(step, inputs, hidden) if scored else {}
        sampled = hidden[self._send(inputs.rows)] if scored else hidden
        logits = self.forward.logits(sampled) if inputs.samples else None
        return Forwarded(step, inputs.samples, slots, answers, logits, None, prompts)

    @torch.inference_mode()
    def launch_sampling(self, forwarded: Forwarded) -> Launched:
        """Start sampling from a forward pass. Constraints and penalties read all tokens before: they must be known."""
        step, rows, slots, answers, logits, drawn, prompts, decoded = forwarded
        if logits is None:
            return Launched(step, [], prompt_logprobs=prompts)
        if drawn is not None and all([answer.plain for answer in answers]):  # noqa: C419 - a list is faster here
            return self._on_the_way(step, rows, Sampled(drawn), {})
        if decoded is not None and self._masked is not None and self._masked.fits(answers):
            masked, failures = self._masked.run(decoded, rows, answers)
            return self._on_the_way(step, rows, Sampled(masked, None, failures), {})
        sampled = sample(logits, rows, answers)
        # Sampled tokens stay on the device, where the next step finds them before the host has read them.
        self._last_tokens[self._send(slots)] = sampled.drawn.tokens
        return self._on_the_way(step, rows, sampled, prompts)

    def read(self, launched: Launched) -> tuple[list[int], list[float], list[tuple[tuple[int, float], ...]] | None]:
        """Wait for a step; return tokens, log-probabilities and most likely tokens in the order of its rows."""
        if launched.host is None:
            return [], [], None
        if launched.ready is not None:
            launched.ready.synchronize()
        count = len(launched.samples)
        tokens, logprobs = (tensor[:count].tolist() for tensor in launched.host)
        tops = None if launched.tops is None else [tuple(top or ()) for top in launched.tops]
        return tokens, logprobs, tops

    def _on_the_way(
        self, step: Step, rows: list[SampleRow], sampled: Sampled, prompts: dict[int, list[TokenLogprob]]
    ) -> Launched:
        launched = Launched(step, rows, sampled.drawn, sampled.tops, prompts, sampled.failures)
        if self.device.type == "cuda":
            launched.host = Drawn(*(tensor.to("cpu", non_blocking=True) for tensor in sampled.drawn))
            launched.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            launched.ready.record()
        return launched

    def release(self, sequence: Sequence) -> None:
        """Free the table row of a sequence that ended or was preempted."""
        self.tables.release(sequence)

    def _hidden(self, inputs: StepInputs, *, every: bool = False) -> Tensor:
        """Return the hidden states of the rows that are sampled from, or of every token."""
        tokens, positions = self._send(inputs.tokens).long(), self._send(inputs.positions).long()
        if (inputs.from_slot >= 0).any():
            source = self._send(inputs.from_slot).long()
            tokens = torch.where(source >= 0, self._last_tokens[source], tokens)
        rows, starts = self._send(inputs.slots).long(), self._send(inputs.starts)
        tables = self._tables[rows]
        owners = self._send(np.repeat(np.arange(len(inputs.slots)), np.diff(inputs.starts)))
        size = self.cache.block_size
        slots = tables[owners, positions // size].long() * size + positions % size
        longest = max(context for _, context in inputs.spans)
        batch = PagedBatch(
            tables,
            starts,
            self._send(inputs.contexts),
            slots,
            max(count for count, _ in inputs.spans),
            longest,
            inputs.spans,
            self.invariant,
        )
        every = every or len(inputs.rows) == len(inputs.tokens)
        return self.forward.hidden(tokens, positions, batch, None if every else self._send(inputs.rows))

    def _prompt_logprobs(self, step: Step, inputs: StepInputs, hidden: Tensor) -> dict[int, list[TokenLogprob]]:
        found: dict[int, list[TokenLogprob]] = {}
        for chunk, start in zip(step.chunks, inputs.starts[:-1].tolist(), strict=True):
            sequence = chunk.sequence
            count = _answer(sequence).params.prompt_logprobs
            end = min(chunk.start + chunk.size, sequence.prompt_length - 1)
            if count is None or chunk.start >= end:
                continue
            # A few rows at a time: the logits of a long prompt would not fit.
            rows: list[TokenLogprob] = []
            for begin in range(chunk.start, end, _PROMPT_ROWS):
                stop = min(begin + _PROMPT_ROWS, end)
                logits = self.forward.logits(hidden[start + begin - chunk.start : start + stop - chunk.start])
                rows += prompt_logprobs(logits, sequence.tokens[begin + 1 : stop + 1], count)
            found[sequence.number] = rows
        return found

    def _send(self, array: Any) -> Tensor:
        host = torch.from_numpy(array)
        if self.device.type != "cuda":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)


def _answer(sequence: Sequence) -> AnswerSampler:
    owner: Any = sequence.owner
    sampler: AnswerSampler = owner.sampler
    return sampler
