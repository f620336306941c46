"""The answers of a request while they are decoded: sampled tokens in, events out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.serve.execution.sampler import AnswerSampler
from piledriver.serve.request import (
    Completion,
    Delta,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    TopLogprobs,
    best_completions,
)
from piledriver.serve.scheduling.sequence import Sequence
from piledriver.serve.text.answer_text import AnswerText


class AnswerSink(Protocol):
    """Takes tokens as they are read, without an event for each: what another process delivers costs the step little."""

    def push(self, answer: Answer, token: int, logprob: float, top: TopLogprobs) -> None:
        """Take one token of an answer."""

    def report(self, group: AnswerGroup) -> None:
        """Take note that answers of a request have ended."""


class Answer:
    """One answer: decides after each token whether it ends, and what text may be shown."""

    def __init__(
        self,
        sequence: Sequence,
        sampler: AnswerSampler,
        index: int,
        tokenizer: Tokenizer | None,
        eos: frozenset[int],
        sink: AnswerSink | None = None,
    ) -> None:
        self.sequence, self.sampler = sequence, sampler
        self.group: AnswerGroup
        self.params: SamplingParams = sampler.params
        wants_logprobs = self.params.logprobs is not None
        self.completion = Completion(index, logprobs=[] if wants_logprobs else None)
        self.silent_end = False
        """Whether the last token only ended the answer and is not part of its text."""
        self.reported = False
        """Whether the sink knows that the answer has ended."""
        self._eos = frozenset() if self.params.ignore_eos else eos
        self._stop_ids = frozenset(self.params.stop_token_ids)
        # Without stop strings the text decides nothing: it is decoded when it is asked for, several tokens at once,
        # or by the reader of the sink.
        self._eager = bool(self.params.stop)
        decodes = tokenizer is not None and (self._eager or sink is None)
        self._text = AnswerText(tokenizer, self.params) if decodes and tokenizer is not None else None
        self._sink = sink
        self._decoded = self._sent_tokens = self._sent_text = 0

    def push(self, token: int, logprob: float, top: TopLogprobs) -> bool:
        """Append a sampled token; return whether the answer has ended."""
        done, params = self.completion, self.params
        done.token_ids.append(token)
        done.cumulative_logprob += logprob
        if self._sink is not None:
            self._sink.push(self, token, logprob, top)
        if done.logprobs is not None:
            done.logprobs.append(TokenLogprob(token, logprob, top))
        constraint = self.sampler.constraint
        if constraint is not None:
            constraint.accept(token)
        free = len(done.token_ids) > params.min_tokens
        if free and (token in self._eos or token in self._stop_ids):
            done.stop_reason = None if token in self._eos else token
            self.silent_end = True
            return self._end("stop")
        if self._eager:
            stop = self._decode()
            if stop is not None and free:
                done.stop_reason, done.finish_reason = stop, "stop"
                return True
        if constraint is not None and constraint.finished:
            return self._end("stop")
        sequence = self.sequence
        if len(done.token_ids) >= sequence.limit - sequence.prompt_length:
            return self._end("length")
        return False

    def end(self, reason: FinishReason) -> None:
        """End the answer from outside: it was cancelled, or failed."""
        if not self.completion.finished:
            self._end(reason)

    def delta(self) -> Delta | None:
        """Return what is new since the last call, or None."""
        done = self.completion
        if not done.finished:
            self._decode()
        tokens, text = done.token_ids[self._sent_tokens :], done.text[self._sent_text :]
        if not tokens and not text and not done.finished:
            return None
        logprobs = None if done.logprobs is None else done.logprobs[self._sent_tokens :]
        self._sent_tokens, self._sent_text = len(done.token_ids), len(done.text)
        return Delta(done.index, tokens, text, logprobs, done.finish_reason, done.stop_reason)

    def _decode(self) -> str | None:
        """Append the text of tokens that were not decoded yet; return the stop string that they complete."""
        if self._text is None:
            return None
        done = self.completion
        tokens = done.token_ids[self._decoded : len(done.token_ids) - self.silent_end]
        if not tokens:
            return None
        self._decoded += len(tokens)
        text, stop = self._text.push(tokens)
        done.text += text
        return stop

    def _end(self, reason: FinishReason) -> bool:
        done = self.completion
        if self._text is not None:
            self._decode()
            done.text += self._text.finish()
        done.finish_reason = reason
        return True


@dataclass(eq=False)
class AnswerGroup:
    """A request and its answers."""

    request: Request
    answers: list[Answer]
    on_output: Callable[[RequestOutput], None] | None = None
    only_final: bool = False
    """Make no event before the request is finished."""
    sink: AnswerSink | None = None
    """Takes tokens and ends instead of events."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    scheduled_at: float | None = None

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return all(answer.completion.finish_reason is not None for answer in self.answers)

    def event(self) -> RequestOutput | None:
        """Return what is new since the last event, or None."""
        params, finished = self.request.params, self.finished
        if self.only_final and not finished:
            return None
        all_shown = params.draws == params.n
        deltas = [delta for answer in self.answers if (delta := answer.delta()) is not None] if all_shown else []
        if not deltas and not finished:
            return None
        completions = [answer.completion for answer in self.answers]
        if finished and not all_shown:
            completions = best_completions(completions, params.n)
        return RequestOutput(
            self.request.id,
            self.request.prompt,
            tuple(deltas),
            tuple(completions),
            finished,
            self.prompt_logprobs,
            self.answers[0].sequence.cached,
            self.error,
            self.scheduled_at,
        )
