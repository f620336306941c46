"""The inference engine: requests in, events out, one step at a time or by a thread in the background.

Any thread may call `add_request` and `abort`; they take effect at the next step. `step` runs in one thread at a time:
the caller's, or the one that `start` makes.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from piledriver.core.errors import UsageError
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.models import Transformer
from piledriver.serve.answer import AnswerGroup, AnswerSink
from piledriver.serve.config import EngineConfig
from piledriver.serve.errors import ServeError
from piledriver.serve.execution.tensor_parallel.forward import TensorParallelForward, follow
from piledriver.serve.execution.tensor_parallel.ranks import tensor_parallel_ranks
from piledriver.serve.request import (
    Constraint,
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
    check_request,
)
from piledriver.serve.scheduling.scheduler import Step
from piledriver.serve.step_loop import StepLoop

_log = logging.getLogger("piledriver.serve")
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
        self._steps = StepLoop(self.model, tokenizer, self.eos, self.config, draft_model)
        self.runner, self.scheduler, self.pool = self._steps.runner, self._steps.scheduler, self._steps.pool
        self.max_context = self._steps.max_context
        """Longest prompt and answer together."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._ids = itertools.count()
        self._taken: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._preparations: Iterator[bool] | None = None
        self._on_done: Callable[[], None] | None = None
        self.failure: BaseException | None = None
        """Why the engine has stopped; None while it works."""
        self.runner.compile_first_steps()

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
        sink: AnswerSink | None = None,
    ) -> str:
        """Queue a request and return its id; raise `RequestError` if it cannot be served.

        `on_output` gets the events of this request, in the thread that steps; it must not block. With `only_final`
        there is one event, at the end. With a `sink` there are none: it gets tokens and ends, in the same thread.
        """
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
        check_request(
            request,
            vocab_size=self.model.config.vocab_size,
            max_context=self.max_context,
            has_tokenizer=self.tokenizer is not None,
        )
        with self._wake:
            self._check_alive()
            if identity in self._taken:
                raise RequestError(f"request id {identity!r} is in use", fix="choose another", parameter="request_id")
            self._taken.add(identity)
            self._inbox.append(lambda: self._steps.begin(AnswerGroup(request, [], on_output, only_final, sink)))
            self._wake.notify()
        return identity

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise ServeError(f"the engine has stopped: {self.failure}", fix="start a new one") from self.failure

    def abort(self, request_id: str) -> None:
        """Cancel a request; its blocks are free before the next step. Unknown and finished ids are ignored."""
        with self._wake:
            self._inbox.append(lambda: self._steps.cancel(request_id))
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

    # Steps

    def observe_steps(self, launched: Callable[[Step], None], done: Callable[[], None] | None = None) -> None:
        """Call a function with every step before it is launched, and one after it, in the thread that steps."""
        self._steps.on_step, self._on_done = launched, done

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._inbox or self._steps.groups)

    def step(self) -> list[RequestOutput]:
        """Run one step and return the events that it made; on a GPU, those of the step before."""
        self._take_orders()
        events = self._steps.step()
        if self._steps.ended:
            self._taken.difference_update(self._steps.ended)
            self._steps.ended.clear()
        if self._on_done is not None:
            self._on_done()
        return events

    def _take_orders(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

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

    def start(self, *, prepare: bool = False, on_prepared: Callable[[], None] | None = None) -> None:
        """Step in a thread of the engine's own until `stop`; it sleeps while there is nothing to do.

        With `prepare`, idle time is used to compile kernels and capture CUDA graphs of all batch sizes, so that no
        request has to wait for its own; `on_prepared` is called when that is done.
        """
        if self._thread is None:
            self._stopping = False
            self._preparations = self._prepare(on_prepared) if prepare else None
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
                    while not (self._stopping or self.busy or self._preparations is not None):
                        self._wake.wait()
                    if self._stopping:
                        return
                if self.busy:
                    self.step()
                elif self._preparations is not None and next(self._preparations, None) is None:
                    self._preparations = None
        except BaseException as error:
            with self._wake:  # a request that comes later is refused
                self.failure = error
            self._take_orders()
            self._steps.fail(error)
            if self._on_done is not None:
                self._on_done()

    def _prepare(self, on_prepared: Callable[[], None] | None) -> Iterator[bool]:
        """Prepare one batch size at each turn."""
        try:
            for part in self.runner.preparations():
                self.runner.prepare(part)
                yield True
        except Exception as error:  # no memory, say: what is left is prepared when it is used
            _log.warning("not all batch sizes were prepared: %s: %s", type(error).__name__, error)
        if on_prepared is not None:
            on_prepared()

    @property
    def follows(self) -> bool:
        """Whether this process is a rank other than 0 of a tensor-parallel model: it must call `follow`."""
        return tensor_parallel_ranks(self.model)[0] > 0

    def follow(self) -> None:
        """Compute this rank's shard of the steps that rank 0 runs, until it closes its engine."""
        dtype = self.model.compute_dtype or next(self.model.parameters()).dtype
        follow(self.runner.forward, self.runner.device, dtype, invariant=self.config.deterministic)

    def close(self) -> None:
        """Stop the background thread, and the other ranks of a tensor-parallel model."""
        self.stop()
        if isinstance(self.runner.forward, TensorParallelForward):
            self.runner.forward.close()

    def update_weights(self, model: Transformer | None = None) -> None:
        """Use new weights from the next step on: those of `model`, or the served module's own, changed in place.

        Nothing is copied if `model` is the served module or shares its parameters. Cached prefixes are forgotten, and
        running requests are computed again from their tokens so far.
        """
        if model is not None and isinstance(self.runner.forward, TensorParallelForward):
            raise ServeError(
                "weights of another model cannot be copied to several ranks",
                fix="change the shards of each rank in place, then call update_weights()",
            )
        if model is not None and model.config != self.model.config:
            raise ServeError("the new model has another config than the served one", fix="make another engine for it")
        done = threading.Event()
        with self._wake:
            self._check_alive()
            self._inbox.append(lambda: self._steps.swap_weights(model))
            self._inbox.append(done.set)
            self._wake.notify()
        if self._thread is None:
            self._take_orders()
        else:
            done.wait()
            self._check_alive()


def end_tokens(model: Transformer, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokens that end an answer: the model folder's `eos_token_id`, else the tokenizer's boundary token."""
    found = model.generation.get("eos_token_id")
    if found is None and tokenizer is not None:
        with suppress(UsageError):
            found = tokenizer.boundary()
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
