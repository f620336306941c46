"""`/v1/completions`: prompts to answers, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from piledriver.serve.http.events import EventStream, together
from piledriver.serve.http.sampling import grammar_of, sampling_params
from piledriver.serve.http.schema import CompletionBody
from piledriver.serve.http.served_model import ServedModel
from piledriver.serve.http.usage import Usage, failure_of
from piledriver.serve.request import RequestError, RequestOutput, TokenLogprob

MAX_PROMPTS = 4096


class CompletionTask:
    """One call of `/v1/completions`: a request for each prompt."""

    def __init__(self, served: ServedModel, body: CompletionBody) -> None:
        if body.suffix is not None:
            raise RequestError("suffix is not supported", fix="leave it out", parameter="suffix")
        self.served, self.body = served, body
        self.prompts = self._encode(body.prompt)
        asked = 16 if body.max_tokens is None else body.max_tokens
        self.score_only = asked == 0 and body.echo
        logprobs = body.logprobs
        params = sampling_params(body, max_tokens=1 if self.score_only else asked, logprobs=logprobs)
        if body.echo and logprobs is not None and params.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=logprobs)
        if len(self.prompts) * params.draws > MAX_PROMPTS:
            raise RequestError(
                f"{len(self.prompts)} prompts with {params.draws} answers each are too many",
                fix=f"ask for at most {MAX_PROMPTS} answers in one request",
                parameter="n",
            )
        if body.echo and body.stream:
            raise RequestError("echo cannot be streamed", fix="leave out echo or stream", parameter="echo")
        self.params, self.grammar = params, grammar_of(body, served.grammars)
        self.id, self.created = f"cmpl-{uuid.uuid4().hex}", int(time.time())

    def _encode(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
        special = self.body.add_special_tokens
        many: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not 1 <= len(many) <= MAX_PROMPTS:
            raise RequestError(
                f"there are {len(many)} prompts", fix=f"send 1 to {MAX_PROMPTS} prompts", parameter="prompt"
            )
        encoded = [
            self.served.encoder.encode(one, add_special_tokens=special) if isinstance(one, str) else list(one)
            for one in many
        ]
        limit = self.body.truncate_prompt_tokens
        return encoded if limit is None else [ids[-limit:] for ids in encoded]

    def _submit(self, prompt: list[int]) -> EventStream:
        return self.served.bridge.submit(
            prompt,
            self.params,
            grammar=self.grammar,
            priority=self.body.priority,
            cache_salt=self.body.cache_salt or "",
        )

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        usage = Usage()
        choices: list[dict[str, Any]] = []
        async with AsyncExitStack() as stack:
            # Every prompt is queued before the first answer is awaited, so that they share steps.
            streams = [await stack.enter_async_context(self._submit(prompt)) for prompt in self.prompts]
            finals = await asyncio.gather(*(self._final(stream) for stream in streams))
        for number, final in enumerate(finals):
            if error := failure_of(final):
                raise error
            usage.add(final, free=self.score_only)
            choices += [self._choice(final, number, completion) for completion in final.completions]
        return self._frame(choices) | {"usage": usage.body()}

    async def _final(self, stream: EventStream) -> RequestOutput:
        observer = self.served.metrics.observer()
        async for event in stream.events():
            observer.see(event)
        return event

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a streamed answer."""
        usage, options = Usage(), self.body.stream_options
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(self._submit(prompt)) for prompt in self.prompts]
            observers = [self.served.metrics.observer() for _ in streams]
            async for number, event in together(streams):
                observers[number].see(event)
                if error := failure_of(event):
                    raise error
                for choice in self._chunks(number, event):
                    yield self._frame([choice])
                if event.finished:
                    usage.add(event)
        if options is not None and options.include_usage:
            yield self._frame([]) | {"usage": usage.body()}

    def _chunks(self, number: int, event: RequestOutput) -> list[dict[str, Any]]:
        """Return what an event adds to each answer."""
        if event.finished and self.params.draws != self.params.n:  # the chosen answers come at the end, whole
            return [self._choice(event, number, completion) for completion in event.completions]
        chunks = []
        for delta in event.deltas:
            choice: dict[str, Any] = {
                "index": number * self.params.n + delta.index,
                "text": delta.text,
                "logprobs": self._logprobs(delta.logprobs) if delta.logprobs else None,
                "finish_reason": delta.finish_reason,
            }
            if self.body.return_token_ids:
                choice["token_ids"] = delta.token_ids
            chunks.append(choice)
        return chunks

    def _choice(self, final: RequestOutput, number: int, completion: Any) -> dict[str, Any]:
        text = "" if self.score_only else completion.text
        entries: list[TokenLogprob | None] = [] if self.score_only else list(completion.logprobs or ())
        if self.body.echo:
            text = self.served.tokenizer.decode(final.prompt_token_ids) + text
            entries = [*(final.prompt_logprobs or ()), *entries]
        choice: dict[str, Any] = {
            "index": number * self.params.n + completion.index,
            "text": text,
            "logprobs": self._logprobs(entries, final.prompt_token_ids) if self.body.logprobs is not None else None,
            "finish_reason": "length" if self.score_only else completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self.body.return_token_ids:
            choice |= {"token_ids": completion.token_ids, "prompt_token_ids": list(final.prompt_token_ids)}
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [
                None
                if entry is None
                else {str(token): value for token, value in ((entry.token, entry.logprob), *entry.top)}
                for entry in final.prompt_logprobs or ()
            ]
        return choice

    def _logprobs(self, entries: Sequence[TokenLogprob | None], prompt: Sequence[int] = ()) -> dict[str, Any]:
        tokens: list[str] = []
        values: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        offset = 0
        for position, entry in enumerate(entries):
            token = prompt[position] if entry is None else entry.token
            text = self.served.token_text(token)
            tokens.append(text)
            values.append(None if entry is None else finite(entry.logprob))
            found = {} if entry is None else {self.served.token_text(t): finite(v) for t, v in entry.top}
            if entry is not None:
                found.setdefault(text, finite(entry.logprob))
            top.append(None if entry is None else found)
            offsets.append(offset)
            offset += len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": self.served.fingerprint,
            "choices": choices,
        }


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold: OpenAI writes -9999.0 for zero probability."""
    return logprob if logprob > -9999.0 else -9999.0
