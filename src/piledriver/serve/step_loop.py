"""The step loop of the engine: schedule, launch, read, make events. One thread at a time.

On a GPU step N + 1 is launched before the tokens of step N are read, so that the device does not wait for the host.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.kernels.linear.onednn import forget_packed
from piledriver.models import Transformer
from piledriver.serve.answer import Answer, AnswerGroup
from piledriver.serve.config import EngineConfig
from piledriver.serve.execution.build import build_runner
from piledriver.serve.execution.inputs import SampleRow
from piledriver.serve.execution.runner import Forwarded, Launched
from piledriver.serve.execution.sampler import AnswerSampler
from piledriver.serve.request import RequestOutput
from piledriver.serve.scheduling.blocks import BlockPool
from piledriver.serve.scheduling.scheduler import Scheduler, Step
from piledriver.serve.scheduling.sequence import Sequence as Decoded
from piledriver.serve.speculation import make_speculator


class StepLoop:
    """Runs the requests that it was given until they end."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        eos: frozenset[int],
        config: EngineConfig,
        draft_model: Transformer | None,
    ) -> None:
        self.model, self.tokenizer, self.eos, self.config = model, tokenizer, eos, config
        self.runner, blocks = build_runner(model, config)
        on_gpu = self.runner.device.type == "cuda"
        self.max_context = self.runner.cache.length
        self.pool = BlockPool(blocks, config.block_size)
        self.scheduler = Scheduler(
            self.pool,
            token_budget=config.token_budget or (8192 if on_gpu else 512),
            max_sequences=config.max_sequences,
            prefix_cache=config.prefix_cache,
        )
        self.groups: dict[str, AnswerGroup] = {}
        """Requests that are not finished."""
        self.on_step: Callable[[Step], None] | None = None
        """Sees every step before it is launched, for metrics."""
        self._speculator = make_speculator(config, draft_model)
        self._overlap = on_gpu
        self._numbers = itertools.count()
        self._in_flight: Launched | None = None
        self._host_bound = 0  # answers whose logits depend on tokens that the host must read first
        self._changed: dict[str, AnswerGroup] = {}
        self.ended: list[str] = []
        """Ids of requests that have finished; the caller clears it."""

    def begin(self, group: AnswerGroup) -> None:
        """Queue the answers of a request."""
        request, answers = group.request, group.answers
        params = request.params
        limit = min(len(request.prompt) + (params.max_tokens or self.max_context), self.max_context)
        ends = (frozenset() if params.ignore_eos else self.eos) | set(params.stop_token_ids)
        for index in range(params.draws):
            constraint = request.constraints[index] if request.constraints else None
            sequence = Decoded(
                number=next(self._numbers),
                tokens=list(request.prompt),
                prompt_length=len(request.prompt),
                limit=limit,
                priority=request.priority,
                salt=request.cache_salt,
                reuse=params.prompt_logprobs is None,
            )
            answer = Answer(
                sequence,
                AnswerSampler(params, index, constraint, frozenset(ends)),
                index,
                self.tokenizer,
                self.eos,
                group.sink,
            )
            sequence.owner = answer
            answers.append(answer)
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None]
        for answer in answers:
            answer.group = group
            self.scheduler.add(answer.sequence)
            self._host_bound += answer.sampler.changes_logits
        self.groups[request.id] = group

    def cancel(self, request_id: str) -> None:
        """End a request; its blocks are free at once. Unknown ids are ignored."""
        group = self.groups.get(request_id)
        if group is not None:
            for answer in group.answers:
                if not answer.completion.finished:
                    answer.end("abort")
                    self._drop(answer.sequence)
            self._changed[request_id] = group

    def step(self) -> list[RequestOutput]:
        """Run one step and return the events that it made; on a GPU, those of the step before."""
        if self._speculator is not None:
            self._finish()
        self._propose()
        step = self.scheduler.schedule()
        for sequence in step.preempted:
            self.runner.release(sequence)
        for sequence in step.admitted:
            group = _answer(sequence).group
            group.scheduled_at = group.scheduled_at or time.perf_counter()
        if self.on_step is not None and step.chunks:
            self.on_step(step)
        forwarded = self._launch(step) if step.chunks else None
        before = self._in_flight
        if self._host_bound and before is not None:
            # Sampling needs the tokens of the step before, which are read while the forward pass runs.
            self._finish()
            before = None
        launched = None if forwarded is None else self._launch_sampling(forwarded)
        if launched is not None:
            for row in launched.samples:
                if not row.draft:
                    row.sequence.pending += 1
        self._in_flight = launched
        if before is not None:
            self._read(before)
        if self._in_flight is not None and not self._overlap:
            self._finish()
        return self._events()

    def _launch(self, step: Step) -> Forwarded | None:
        """Launch the forward pass of a step; None if it does not fit in memory."""
        try:
            return self.runner.launch_forward(step)
        except torch.OutOfMemoryError:
            self._shrink(step)
            return None

    def _launch_sampling(self, forwarded: Forwarded) -> Launched | None:
        try:
            return self.runner.launch_sampling(forwarded)
        except torch.OutOfMemoryError:
            self._shrink(forwarded.step)
            return None

    def _shrink(self, step: Step) -> None:
        """Halve the token budget and compute everything again, after a step that did not fit in memory."""
        self._finish()
        if step.tokens == 1:
            self._fail_group(_answer(step.chunks[0].sequence).group, "out of memory")
        self.scheduler.token_budget = max(step.tokens // 2, 1)
        for sequence in self.scheduler.preempt_all():
            self.runner.release(sequence)
        self.pool.clear_cache()
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fail_group(self, group: AnswerGroup, reason: str) -> None:
        """End one request with an error; the others continue."""
        group.error = group.error or reason
        for answer in group.answers:
            if not answer.completion.finished:
                answer.end("error")
                self._drop(answer.sequence)
        self._changed[group.request.id] = group

    def _finish(self) -> None:
        launched, self._in_flight = self._in_flight, None
        if launched is not None:
            self._read(launched)

    def _read(self, launched: Launched) -> None:
        for chunk in launched.step.chunks if launched.prompt_logprobs else ():
            first, found = _answer(chunk.sequence), launched.prompt_logprobs.get(chunk.sequence.number)
            known = first.group.prompt_logprobs
            if found and known is not None and first is first.group.answers[0]:
                known[chunk.start + 1 : chunk.start + 1 + len(found)] = found
        rows = launched.samples
        tokens, logprobs, tops = self.runner.read(launched)
        if self._speculator is None:
            for at, row in enumerate(rows):
                answer: Any = row.sequence.owner
                completion = answer.completion
                if completion.finish_reason is None:
                    if at in launched.failures:
                        self._fail_group(answer.group, launched.failures[at])
                        continue
                    try:
                        ended = answer.push(tokens[at], logprobs[at], () if tops is None else tops[at])
                    except Exception as error:  # a constraint or a tokenizer; the other requests continue
                        self._fail_group(answer.group, f"{type(error).__name__}: {error}")
                        continue
                    row.sequence.tokens.append(tokens[at])
                    row.sequence.pending -= 1
                    group = answer.group
                    if ended or not (group.only_final or group.sink is not None):
                        self._changed[group.request.id] = group
                    if ended:
                        self._drop(row.sequence)
            return
        begin = 0
        while begin < len(rows):
            end = begin + 1
            while end < len(rows) and rows[end].draft:
                end += 1
            failure = next((launched.failures[at] for at in range(begin, end) if at in launched.failures), None)
            part = slice(begin, end)
            self._verify(rows[begin].sequence, rows[part], tokens[part], logprobs[part], tops and tops[part], failure)
            begin = end

    def _verify(
        self,
        sequence: Decoded,
        rows: list[SampleRow],
        tokens: list[int],
        logprobs: list[float],
        tops: list[tuple[tuple[int, float], ...]] | None,
        failure: str | None,
    ) -> None:
        """Accept the first token, and each further one as long as the draft token before it was right."""
        answer = _answer(sequence)
        if answer.completion.finished:
            return
        if failure is not None:
            self._fail_group(answer.group, failure)
            return
        accepted: list[int] = []
        ended = False
        for at, token in enumerate(tokens):
            if ended or (at and rows[at].draft[-1] != accepted[-1]):
                break
            accepted.append(token)
            try:
                ended = answer.push(token, logprobs[at], () if tops is None else tops[at])
            except Exception as error:
                self._fail_group(answer.group, f"{type(error).__name__}: {error}")
                return
        if self._speculator is not None and len(tokens) > 1:
            self._speculator.observe(sequence, proposed=len(tokens) - 1, accepted=len(accepted) - 1)
        self.scheduler.accepted(sequence, accepted)
        self._changed[answer.group.request.id] = answer.group
        if ended:
            self._drop(sequence)

    def _propose(self) -> None:
        if self._speculator is None:
            return
        for sequence in self.scheduler.running:
            room = sequence.limit - sequence.known - 1
            if sequence.computed == sequence.known - 1 and room > 0 and not sequence.pending:
                sequence.draft = self._speculator.propose(sequence, min(room, self.config.speculate_tokens))

    def _drop(self, sequence: Decoded) -> None:
        self._host_bound -= _answer(sequence).sampler.changes_logits
        self.scheduler.remove(sequence)
        self.runner.release(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence)

    def _events(self) -> list[RequestOutput]:
        events = []
        for identity, group in self._changed.items():
            if group.sink is not None:
                group.sink.report(group)
            elif (event := group.event()) is not None:
                events.append(event)
                if group.on_output is not None:
                    group.on_output(event)
            if group.finished:
                self.groups.pop(identity, None)
                self.ended.append(identity)
        self._changed.clear()
        return events

    def fail(self, error: BaseException) -> None:
        """End every request with the reason that the engine stopped."""
        for group in self.groups.values():
            group.error = f"{type(error).__name__}: {error}"
            for answer in group.answers:
                answer.end("error")
            self._changed[group.request.id] = group
        self._events()

    def swap_weights(self, model: Transformer | None) -> None:
        """Copy the parameters of `model` that are not shared; compute running requests again from their tokens."""
        self._finish()
        if model is not None and model is not self.model:
            with torch.no_grad():
                for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
                    if mine.data_ptr() != theirs.data_ptr():
                        mine.copy_(theirs)
        forget_packed(self.model.parameters())
        for sequence in self.scheduler.preempt_all():
            self.runner.release(sequence)
        self.pool.clear_cache()


def _answer(sequence: Decoded) -> Answer:
    owner = sequence.owner
    assert isinstance(owner, Answer)
    return owner
