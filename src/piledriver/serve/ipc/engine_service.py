"""`EngineService`: serves an engine over a socket. Each step sends one message, whatever the number of requests.

The engine's thread appends tokens to lists. A thread of its own encodes and sends them, so that a slow reader never
stops the engine; another one reads requests.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from queue import SimpleQueue

from piledriver.runtime.dtensor import is_dtensor
from piledriver.serve.answer import Answer, AnswerGroup
from piledriver.serve.engine import Engine
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
    Report,
    Submit,
    decode_command,
    frame,
)
from piledriver.serve.request import TopLogprobs
from piledriver.serve.scheduling.scheduler import Step
from piledriver.serve.structured.grammar import Grammar, GrammarCompiler

_READ_BYTES = 1 << 20


class EngineService:
    """Runs the requests that come over a socket and sends back what their steps make."""

    def __init__(self, engine: Engine, connection: socket.socket) -> None:
        self._engine, self._connection = engine, connection
        self._queue: SimpleQueue[Report | None] = SimpleQueue()
        self._outputs = self._empty()
        self._numbers: dict[str, int] = {}
        self._grammars: GrammarCompiler | None = None
        if engine.tokenizer is not None:
            self._grammars = GrammarCompiler(engine.tokenizer, engine.model.config.vocab_size, engine.eos)
        self.ready = threading.Event()
        """Set when the server listens."""
        self.url = ""
        engine.observe_steps(self._see_step, self._flush)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._read, "piledriver-requests"), (self._write, "piledriver-outputs"))
        ]

    def start(self) -> None:
        """Send what the server must know, and serve until the connection is closed."""
        engine = self._engine
        self._queue.put(
            EngineFacts(
                engine.max_context,
                engine.model.config.vocab_size,
                sorted(engine.eos),
                engine.pool.count,
                weights_fingerprint(engine),
            )
        )
        for thread in self._threads:
            thread.start()
        engine.start(prepare=True, on_prepared=lambda: self._queue.put(AllPrepared()))

    def close(self) -> None:
        """Stop the engine and close the connection."""
        self._engine.close()
        self._queue.put(None)
        self._threads[1].join(1.0)
        self._connection.close()

    # The engine's thread

    def push(self, answer: Answer, token: int, logprob: float, top: TopLogprobs) -> None:
        """Take one token of an answer."""
        outputs, group = self._outputs, answer.group
        number = self._numbers[group.request.id]
        if top:
            outputs.tops[len(outputs.tokens)] = top
        if answer.completion.index == 0 and len(answer.completion.token_ids) == 1 and group.scheduled_at is not None:
            outputs.scheduled[number] = group.scheduled_at
        outputs.requests.append(number)
        outputs.indices.append(answer.completion.index)
        outputs.tokens.append(token)
        outputs.logprobs.append(logprob)

    def report(self, group: AnswerGroup) -> None:
        """Take note of answers that have ended."""
        number = self._numbers[group.request.id]
        for answer in group.answers:
            done = answer.completion
            if done.finish_reason is not None and not answer.reported:
                answer.reported = True
                self._outputs.ended.append(
                    Ended(number, done.index, done.finish_reason, done.stop_reason, answer.silent_end)
                )
        if group.finished:
            del self._numbers[group.request.id]
            self._outputs.finished.append(
                Finished(number, group.answers[0].sequence.cached, group.error, group.prompt_logprobs)
            )

    def _see_step(self, step: Step) -> None:
        self._outputs.step_tokens.append(step.tokens)
        self._outputs.preempted += len(step.preempted)

    def _flush(self) -> None:
        outputs, failure = self._outputs, self._engine.failure
        if outputs.tokens or outputs.finished or outputs.ended or outputs.step_tokens:
            self._count(outputs)
            self._outputs = self._empty()
            self._queue.put(outputs)
        if failure is not None:
            self._queue.put(Failed(f"{type(failure).__name__}: {failure}"))

    @staticmethod
    def _empty() -> Outputs:
        return Outputs([], [], [], [], {}, {}, [], [], [], 0, 0, 0, 0)

    # Threads of the connection

    def _write(self) -> None:
        try:
            while (message := self._queue.get()) is not None:
                frames = [frame(message)]
                while not self._queue.empty() and (further := self._queue.get()) is not None:
                    frames.append(frame(further))
                self._connection.sendall(b"".join(frames))
        except OSError:  # the server is gone; its process is being waited for
            pass

    def _read(self) -> None:
        frames = FrameReader()
        try:
            while data := self._connection.recv(_READ_BYTES):
                for body in frames.feed(data):
                    self._take(decode_command(body))
        except OSError:
            pass

    def _take(self, command: Command) -> None:
        if isinstance(command, Abort):
            self._engine.abort(_name(command.request))
        elif isinstance(command, Ready):
            self.url = command.url
            self.ready.set()
        else:
            self._begin(command)

    def _begin(self, asked: Submit) -> None:
        name = _name(asked.request)
        self._numbers[name] = asked.request
        try:
            constraints = []
            if asked.grammar is not None and self._grammars is not None:
                grammar = Grammar(asked.grammar, self._grammars.tokens)
                constraints = [grammar.constraint() for _ in range(asked.params.draws)]
            self._engine.add_request(
                asked.prompt,
                asked.params,
                request_id=name,
                priority=asked.priority,
                cache_salt=asked.cache_salt,
                constraints=constraints,
                sink=self,
            )
        except Exception as error:  # this request only; the others continue
            del self._numbers[name]
            failed = self._empty()
            failed.finished.append(Finished(asked.request, 0, f"{type(error).__name__}: {error}", None))
            self._count(failed)
            self._queue.put(failed)

    def _count(self, outputs: Outputs) -> None:
        scheduler = self._engine.scheduler
        outputs.running, outputs.waiting = len(scheduler.running), len(scheduler.waiting)
        outputs.free_blocks = self._engine.pool.free


def weights_fingerprint(engine: Engine) -> str:
    """Return a checksum of the model's config, a sample of every weight and the engine's settings."""
    digest = hashlib.sha256(repr(engine.model.config).encode() + repr(engine.config).encode())
    for name, parameter in engine.model.named_parameters():
        local = parameter.to_local() if is_dtensor(parameter) else parameter  # of a shard: its own
        flat = local.detach().reshape(-1)
        digest.update(name.encode() + str(flat[:: max(1, len(flat) // 64)][:64].float().tolist()).encode())
    return "pd_" + digest.hexdigest()[:12]


def _name(request: int) -> str:
    return f"http-{request}"
