"""`RemoteEngine`: an engine behind a socket, for an event loop.

One message brings the tokens of a whole step; they are appended to their requests, whose readers are woken. A reader
takes everything that has come since its last turn as one event and decodes it then: under load events grow instead of
becoming more.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Sequence

from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.serve.errors import ServeError
from piledriver.serve.ipc.messages import (
    Abort,
    AllPrepared,
    Command,
    Ended,
    EngineFacts,
    Failed,
    Finished,
    FrameReader,
    Outputs,
    Ready,
    Submit,
    decode_report,
    frame,
)
from piledriver.serve.request import (
    Completion,
    Delta,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    best_completions,
    check_request,
)
from piledriver.serve.structured.grammar import Grammar
from piledriver.serve.text.answer_text import AnswerText

_READ_BYTES = 1 << 20


class RemoteEngine:
    """Sends requests to an `EngineService` and keeps their answers."""

    def __init__(self, connection: socket.socket, facts: EngineFacts, tokenizer: Tokenizer) -> None:
        self.facts, self.tokenizer = facts, tokenizer
        self.eos = frozenset(facts.eos)
        self.failure: str | None = None
        """Why the engine has stopped; None while it works."""
        self.prepared = False
        """Whether kernels and graphs of all batch sizes are ready."""
        self.running = self.waiting = 0
        self.free_blocks = facts.blocks
        self.on_step: Callable[[int], None] | None = None
        """Sees the number of tokens of every step, for metrics."""
        self.on_preempted: Callable[[int], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        """Called when the engine's process is gone."""
        connection.setblocking(False)
        self._connection, self._frames = connection, FrameReader()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsent = bytearray()
        self._numbers = itertools.count()
        self._requests: dict[int, RemoteRequest] = {}

    def attach(self) -> None:
        """Read the connection in the running event loop from now on."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._connection)
            self._loop = loop
            loop.add_reader(self._connection, self._readable)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        grammar: Grammar | None = None,
        priority: int = 0,
        cache_salt: str = "",
        wake: Callable[[], None],
    ) -> RemoteRequest:
        """Send a request; raise `RequestError` if it cannot be served. `wake` is called when there is news of it."""
        if self.failure is not None:
            raise ServeError(f"the engine has stopped: {self.failure}", fix="start the server again")
        number = next(self._numbers)
        request = Request(id=str(number), prompt=tuple(prompt), params=params, priority=priority, cache_salt=cache_salt)
        facts = self.facts
        check_request(request, vocab_size=facts.vocab_size, max_context=facts.max_context, has_tokenizer=True)
        self.attach()
        source = None if grammar is None else grammar.source
        self._send(Submit(number, list(request.prompt), params, priority, cache_salt, source))
        opened = self._requests[number] = RemoteRequest(number, request, self.tokenizer, wake)
        return opened

    def abort(self, request: RemoteRequest) -> None:
        """Cancel a request; what still comes of it is ignored."""
        if self._requests.pop(request.number, None) is not None:
            self._send(Abort(request.number))

    def announce(self, url: str) -> None:
        """Tell the engine's process that the server listens."""
        self._send(Ready(url))

    def _send(self, message: Command) -> None:
        self._unsent += frame(message)
        self._writable()

    def _writable(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            if self._loop is not None:
                self._loop.add_writer(self._connection, self._writable)
            return
        except OSError:  # the engine's process is gone: the reader finds out
            self._unsent.clear()
        if self._loop is not None:
            self._loop.remove_writer(self._connection)

    def _readable(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        changed: dict[int, RemoteRequest] = {}
        for body in self._frames.feed(data):
            report = decode_report(body)
            if isinstance(report, Outputs):
                self._take(report, changed)
            elif isinstance(report, Failed):
                self.failure = report.reason
            elif isinstance(report, AllPrepared):
                self.prepared = True
        for request in changed.values():
            request.wake()

    def _take(self, outputs: Outputs, changed: dict[int, RemoteRequest]) -> None:
        known, tops = self._requests, outputs.tops
        for row, (number, index, token, logprob) in enumerate(
            zip(outputs.requests, outputs.indices, outputs.tokens, outputs.logprobs, strict=True)
        ):
            request = known.get(number)
            if request is not None:  # else it was cancelled
                request.answers[index].push(token, logprob, tops.get(row, ()) if tops else ())
                changed[number] = request
        for number, when in outputs.scheduled.items():
            if number in known:
                known[number].scheduled_at = when
        for ended in outputs.ended:
            if ended.request in known:
                known[ended.request].answers[ended.index].ended = ended
                changed[ended.request] = known[ended.request]
        for finished in outputs.finished:
            request = known.pop(finished.request, None)
            if request is not None:
                request.finish(finished)
                changed[finished.request] = request
        self.running, self.waiting, self.free_blocks = outputs.running, outputs.waiting, outputs.free_blocks
        if self.on_step is not None:
            for tokens in outputs.step_tokens:
                self.on_step(tokens)
        if outputs.preempted and self.on_preempted is not None:
            self.on_preempted(outputs.preempted)

    def _lost(self) -> None:
        self.failure = self.failure or "its process has ended"
        if self._loop is not None:
            self._loop.remove_reader(self._connection)
        for number, request in list(self._requests.items()):
            request.finish(Finished(number, 0, self.failure, None))
            request.wake()
        self._requests.clear()
        if self.on_lost is not None:
            self.on_lost()


class RemoteRequest:
    """The answers of one request, as far as they have come."""

    def __init__(self, number: int, request: Request, tokenizer: Tokenizer, wake: Callable[[], None]) -> None:
        self.number, self.wake = number, wake
        self.answers = [RemoteAnswer(index, request.params, tokenizer) for index in range(request.params.draws)]
        self.scheduled_at: float | None = None
        self.finished = False
        self._request = request
        self._cached = 0
        self._error: str | None = None
        self._prompt_logprobs: list[TokenLogprob | None] | None = None

    def finish(self, finished: Finished) -> None:
        """Take the end of the request; answers that did not end by themselves have failed."""
        self.finished = True
        self._cached, self._error = finished.cached_tokens, finished.error
        self._prompt_logprobs = finished.prompt_logprobs
        for index, answer in enumerate(self.answers):
            if answer.ended is None:
                answer.ended = Ended(self.number, index, "error", None, False)

    def take(self) -> RequestOutput | None:
        """Return what has come since the last call as one event; None if nothing has."""
        params = self._request.params
        deltas = [delta for answer in self.answers if (delta := answer.delta()) is not None]
        if not deltas and not self.finished:
            return None
        completions = [answer.completion for answer in self.answers]
        if params.draws != params.n:
            deltas = []
            completions = best_completions(completions, params.n) if self.finished else completions
        return RequestOutput(
            self._request.id,
            self._request.prompt,
            tuple(deltas),
            tuple(completions),
            self.finished,
            self._prompt_logprobs,
            self._cached,
            self._error,
            self.scheduled_at,
        )


class RemoteAnswer:
    """One answer: its tokens, and its text as far as a reader has asked for it."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.completion = Completion(index, logprobs=None if params.logprobs is None else [])
        self.ended: Ended | None = None
        """How the answer ended, once it has."""
        self._text = AnswerText(tokenizer, params)
        # Stop strings are searched token by token, as the engine does it.
        self._at_once = not params.stop
        self._sent = 0

    def push(self, token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> None:
        """Append a token."""
        done = self.completion
        done.token_ids.append(token)
        done.cumulative_logprob += logprob
        if done.logprobs is not None:
            done.logprobs.append(TokenLogprob(token, logprob, top))

    def delta(self) -> Delta | None:
        """Return what is new since the last call, or None."""
        done, ended = self.completion, self.ended
        tokens = done.token_ids[self._sent :]
        if done.finished or not (tokens or ended is not None):
            return None
        logprobs = None if done.logprobs is None else done.logprobs[self._sent :]
        self._sent += len(tokens)
        text = self._decode(tokens[:-1] if ended is not None and ended.silent_end else tokens)
        if ended is not None:
            if not isinstance(ended.stop_reason, str):
                text += self._text.finish()
            done.finish_reason, done.stop_reason = ended.reason, ended.stop_reason
        done.text += text
        return Delta(done.index, tokens, text, logprobs, done.finish_reason, done.stop_reason)

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._at_once:
            return self._text.push(tokens)[0] if tokens else ""
        return "".join([self._text.push((token,))[0] for token in tokens])
