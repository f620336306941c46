"""The answers of a request while they are decoded: sampled tokens in, events out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
)
from piledriver.serve.scheduling.sequence import Sequence
from piledriver.serve.text.detokenizer import Detokenizer, make_detokenizer
from piledriver.serve.text.stop_strings import StopStrings


class Answer:
    """One answer: decides after each token whether it ends, and what text may be shown."""

    def __init__(
        self,
        sequence: Sequence,
        sampler: AnswerSampler,
        index: int,
        tokenizer: Tokenizer | None,
        eos: frozenset[int],
    ) -> None:
        self.sequence, self.sampler = sequence, sampler
        self.group: AnswerGroup
        self.params: SamplingParams = sampler.params
        wants_logprobs = self.params.logprobs is not None
        self.completion = Completion(index, logprobs=[] if wants_logprobs else None)
        self._eos = frozenset() if self.params.ignore_eos else eos
        self._stop_ids = frozenset(self.params.stop_token_ids)
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = make_detokenizer(tokenizer, skip_special_tokens=self.params.skip_special_tokens)
        self._stops = StopStrings(self.params.stop, include=self.params.include_stop)
        self._sent_tokens = self._sent_text = 0

    def push(self, token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> bool:
        """Append a sampled token; return whether the answer has ended."""
        done, params = self.completion, self.params
        done.token_ids.append(token)
        done.cumulative_logprob += logprob
        if done.logprobs is not None:
            done.logprobs.append(TokenLogprob(token, logprob, top))
        constraint = self.sampler.constraint
        if constraint is not None:
            constraint.accept(token)
        free = len(done.token_ids) > params.min_tokens
        if free and (token in self._eos or token in self._stop_ids):
            done.stop_reason = None if token in self._eos else token
            return self._end("stop")
        if self._detokenizer is not None:
            text, stop = self._stops.push(self._detokenizer.push((token,)))
            done.text += text
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
        tokens, text = done.token_ids[self._sent_tokens :], done.text[self._sent_text :]
        if not tokens and not text and not done.finished:
            return None
        logprobs = None if done.logprobs is None else done.logprobs[self._sent_tokens :]
        self._sent_tokens, self._sent_text = len(done.token_ids), len(done.text)
        return Delta(done.index, tokens, text, logprobs, done.finish_reason, done.stop_reason)

    def _end(self, reason: FinishReason) -> bool:
        done = self.completion
        if self._detokenizer is not None:
            text, stop = self._stops.push(self._detokenizer.finish())
            done.text += text
            if stop is None:
                done.text += self._stops.finish()
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
            completions = _best(completions, params.n)
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


def _best(completions: list[Completion], count: int) -> list[Completion]:
    """Return the answers of the highest mean log-probability, the best first, numbered from 0."""
    ranked = sorted(completions, key=lambda c: -c.cumulative_logprob / max(len(c.token_ids), 1))[:count]
    for index, completion in enumerate(ranked):
        completion.index = index
    return ranked
