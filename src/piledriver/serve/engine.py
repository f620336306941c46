"""The inference engine: requests in, events out, one step at a time or by a thread in the background.

Any thread may call `add_request` and `abort`; they take effect at the next step. `step` runs in one thread at a time:
the caller's, or the one that `start` makes.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch

from piledriver.core.errors import UsageError
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.models import Transformer
from piledriver.serve.answer import Answer, AnswerGroup
from piledriver.serve.config import EngineConfig
from piledriver.serve.errors import ServeError
from piledriver.serve.execution.build import build_runner
from piledriver.serve.execution.inputs import SampleRow
from piledriver.serve.execution.runner import Launched
from piledriver.serve.execution.sampler import AnswerSampler
from piledriver.serve.request import Constraint, Request, RequestError, RequestOutput, SamplingParams
from piledriver.serve.scheduling.blocks import BlockPool
from piledriver.serve.scheduling.scheduler import Scheduler, Step
from piledriver.serve.scheduling.sequence import Sequence as Decoded
from piledriver.serve.speculation import make_speculator

OnOutput = Callable[[RequestOutput], None]


class Engine:
    """Serves a model: continuous batching over a paged KV cache.

    >>> from piledriver.models import ModelConfig, Transformer
    >>> engine = Engine(Transformer(ModelConfig(vocab_size=32, dim=16, layers=1, heads=2)))
    >>> [output] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0))
    >>> len(output.completions[0].token_ids), output.completions[0].finish_reason
    (4, 'length')
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        draft_model: Transformer | None = None,
        **settings: Any,
    ) -> None:
        """Serve `model`, whose parameters are used as they are; `settings` are fields of `EngineConfig`."""
        self.config = replace(config or EngineConfig(), **settings)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.eos = end_tokens(model, tokenizer)
        """Tokens that end an answer."""
        self.runner, blocks = build_runner(self.model, self.config)
        device = self.runner.device
        self.max_context = self.runner.cache.length
        self.pool = BlockPool(blocks, self.config.block_size)
        self.scheduler = Scheduler(
            self.pool,
            token_budget=self.config.token_budget or (8192 if device.type == "cuda" else 512),
            max_sequences=self.config.max_sequences,
            prefix_cache=self.config.prefix_cache,
        )
        self._speculator = make_speculator(self.config, draft_model)
        self._overlap = device.type == "cuda"
        self._groups: dict[str, AnswerGroup] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._numbers, self._ids = itertools.count(), itertools.count()
        self._taken: set[str] = set()
        self._in_flight: Launched | None = None
        self._host_bound = 0  # answers whose logits depend on tokens that the host must read first
        self._changed: dict[str, AnswerGroup] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.failure: BaseException | None = None
        """Why the engine has stopped; None while it works."""

    # Requests

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        constraints: Sequence[Constraint] = (),
        on_output: OnOutput | None = None,
        only_final: bool = False,
    ) -> str:
        """Queue a request and return its id; raise `RequestError` if it cannot be served.

        `on_output` gets the events of this request, in the thread that steps; it must not block. With `only_final`
        there is one event, at the end.
        """
        if self.failure is not None:
            raise ServeError(f"the engine has stopped: {self.failure}", fix="start a new one") from self.failure
        params = params or SamplingParams()
        ids = tuple(self.encode(prompt) if isinstance(prompt, str) else (int(token) for token in prompt))
        identity = request_id or f"request-{next(self._ids)}"
        request = Request(
            id=identity,
            prompt=ids,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            constraints=tuple(constraints),
        )
        self._check(request)
        with self._wake:
            if identity in self._taken:
                raise RequestError(f"request id {identity!r} is in use", fix="choose another", parameter="request_id")
            self._taken.add(identity)
            self._inbox.append(lambda: self._begin(AnswerGroup(request, [], on_output, only_final)))
            self._wake.notify()
        return identity

    def abort(self, request_id: str) -> None:
        """Cancel a request; its blocks are free before the next step. Unknown and finished ids are ignored."""
        with self._wake:
            self._inbox.append(lambda: self._cancel(request_id))
            self._wake.notify()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, which must not be empty."""
        if self.tokenizer is None:
            raise RequestError("the engine has no tokenizer", fix="give token ids, or Engine(tokenizer=)")
        return [int(token) for token in self.tokenizer.encode(text)]

    def boundary(self) -> list[int]:
        """Return the document boundary token, which starts a text in training; empty if the tokenizer has none."""
        try:
            return [] if self.tokenizer is None else [self.tokenizer.boundary()]
        except UsageError:
            return []

    def _check(self, request: Request) -> None:
        params, length = request.params, len(request.prompt)
        if length == 0:
            raise RequestError(
                "the prompt is empty", fix="start it with the document boundary token", parameter="prompt"
            )
        vocab = self.model.config.vocab_size
        for name, ids in (
            ("prompt", request.prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            wrong = [token for token in ids if not 0 <= token < vocab]
            if wrong:
                raise RequestError(f"{name} has token {wrong[0]}", fix=f"use ids from 0 to {vocab - 1}", parameter=name)
        asked = params.max_tokens or 1
        if length + asked > self.max_context:
            raise RequestError(
                f"the prompt has {length} tokens and {asked} more are asked for; the context holds {self.max_context}",
                fix=f"shorten the prompt, or ask for at most {max(self.max_context - length, 0)} tokens",
                parameter="prompt",
                code="context_length_exceeded",
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer", fix="give Engine a tokenizer", parameter="stop")
        if request.constraints and len(request.constraints) != params.draws:
            raise RequestError(
                "there must be one constraint for each answer", fix=f"give {params.draws}", parameter="constraints"
            )

    def _begin(self, group: AnswerGroup) -> None:
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
                sequence, AnswerSampler(params, index, constraint, frozenset(ends)), index, self.tokenizer, self.eos
            )
            sequence.owner = answer
            answers.append(answer)
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None]
        for answer in answers:
            answer.group = group
            self.scheduler.add(answer.sequence)
            self._host_bound += answer.sampler.changes_logits
        self._groups[request.id] = group

    def _cancel(self, request_id: str) -> None:
        group = self._groups.get(request_id)
        if group is not None:
            for answer in group.answers:
                if not answer.completion.finished:
                    answer.end("abort")
                    self._drop(answer.sequence)
            self._changed[request_id] = group

    # Steps

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._inbox or self._groups)

    def step(self) -> list[RequestOutput]:
        """Run one step and return the events that it made; on a GPU, those of the step before."""
        while self._inbox:
            self._inbox.popleft()()
        if self._in_flight is not None and not self._can_overlap():
            self._finish()
        self._propose()
        step = self.scheduler.schedule()
        for sequence in step.preempted:
            self.runner.release(sequence)
        launched = self._launch(step) if step.chunks else None
        if launched is not None:
            for row in launched.samples:
                row.sequence.pending = 1
        before, self._in_flight = self._in_flight, launched
        if before is not None:
            self._read(before)
        if self._in_flight is not None and not self._overlap:
            self._finish()
        return self._events()

    def _launch(self, step: Step) -> Launched | None:
        """Launch a step. If it does not fit in memory, halve the token budget and compute everything again."""
        try:
            return self.runner.launch(step)
        except torch.OutOfMemoryError:
            self._finish()
            if step.tokens == 1:
                self._fail_group(_answer(step.chunks[0].sequence).group, "out of memory")
            self.scheduler.token_budget = max(step.tokens // 2, 1)
            for sequence in self.scheduler.preempt_all():
                self.runner.release(sequence)
            self.pool.clear_cache()
            if self.runner.device.type == "cuda":
                torch.cuda.empty_cache()
            return None

    def _fail_group(self, group: AnswerGroup, reason: str) -> None:
        """End one request with an error; the others continue."""
        group.error = group.error or reason
        for answer in group.answers:
            if not answer.completion.finished:
                answer.end("error")
                self._drop(answer.sequence)
        self._changed[group.request.id] = group

    def _can_overlap(self) -> bool:
        """Whether the next step can be scheduled before the last one is read."""
        if not self._overlap or self._speculator is not None:
            return False
        return self._host_bound == 0

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
                    row.sequence.pending = 0
                    group = answer.group
                    if ended or not group.only_final:
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
            event = group.event()
            if event is not None:
                events.append(event)
                if group.on_output is not None:
                    group.on_output(event)
            if group.finished:
                self._groups.pop(identity, None)
                self._taken.discard(identity)
        self._changed.clear()
        return events

    # Offline and background use

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Serve prompts until all are finished; return their last events in the order of the prompts."""
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        done: dict[str, RequestOutput] = {}
        events: SimpleQueue[RequestOutput] = SimpleQueue()
        ids = [
            self.add_request(prompt, one, on_output=events.put, only_final=True)
            for prompt, one in zip(prompts, each, strict=True)
        ]
        while len(done) < len(ids):
            if self._thread is None:
                self.step()
            while self._thread is not None or not events.empty():
                event = events.get()
                if event.finished:
                    done[event.request_id] = event
                    if len(done) == len(ids):
                        break
        return [done[identity] for identity in ids]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[RequestOutput]:
        """Yield the events of one request as they come; closing the iterator cancels the request."""
        events: SimpleQueue[RequestOutput] = SimpleQueue()
        identity = self.add_request(prompt, params, on_output=events.put, **options)
        finished = False
        try:
            while not finished:
                if self._thread is None and events.empty():
                    self.step()
                    continue
                event = events.get()
                finished = event.finished
                yield event
        finally:
            if not finished:
                self.abort(identity)

    def start(self) -> None:
        """Step in a thread of the engine's own until `stop`; it sleeps while there is nothing to do."""
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._loop, name="piledriver-engine", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the background thread after the step that is running; unfinished requests stay queued."""
        thread = self._thread
        if thread is not None:
            with self._wake:
                self._stopping = True
                self._wake.notify()
            thread.join()
            self._thread = None

    def _loop(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._stopping or self.busy):
                        self._wake.wait()
                    if self._stopping:
                        return
                self.step()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End every request with the reason that the engine stopped."""
        self.failure = error
        while self._inbox:
            self._inbox.popleft()()
        for group in self._groups.values():
            group.error = f"{type(error).__name__}: {error}"
            for answer in group.answers:
                answer.end("error")
            self._changed[group.request.id] = group
        self._events()

    def update_weights(self, model: Transformer | None = None) -> None:
        """Use new weights from the next step on: those of `model`, or the served module's own, changed in place.

        Nothing is copied if `model` is the served module or shares its parameters. Cached prefixes are forgotten, and
        running requests are computed again from their tokens so far.
        """
        done = threading.Event()
        with self._wake:
            self._inbox.append(lambda: self._swap_weights(model, done))
            self._wake.notify()
        if self._thread is None:
            while self._inbox:
                self._inbox.popleft()()
        else:
            done.wait()

    def _swap_weights(self, model: Transformer | None, done: threading.Event) -> None:
        self._finish()
        self._events()
        if model is not None and model is not self.model:
            with torch.no_grad():
                for (name, mine), theirs in zip(self.model.named_parameters(), model.parameters(), strict=True):
                    if mine.shape != theirs.shape:
                        raise ServeError(
                            f"{name} is {tuple(theirs.shape)}, served {tuple(mine.shape)}",
                            fix="give a model of the same config",
                        )
                    if mine.data_ptr() != theirs.data_ptr():
                        mine.copy_(theirs)
        for sequence in self.scheduler.preempt_all():
            self.runner.release(sequence)
        self.pool.clear_cache()
        done.set()


def end_tokens(model: Transformer, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokens that end an answer: the model folder's `eos_token_id`, else the tokenizer's boundary token."""
    found = model.generation.get("eos_token_id")
    if found is None and tokenizer is not None:
        with suppress(UsageError):
            found = tokenizer.boundary()
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def _answer(sequence: Decoded) -> Answer:
    owner = sequence.owner
    assert isinstance(owner, Answer)
    return owner
