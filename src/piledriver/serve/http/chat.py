"""`/v1/chat/completions`: messages to the next message, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from piledriver.serve.http.completions import finite
from piledriver.serve.http.sampling import grammar_of, sampling_params
from piledriver.serve.http.schema import ChatBody
from piledriver.serve.http.served_model import ServedModel
from piledriver.serve.http.tool_calls import ToolParser, tool_use
from piledriver.serve.http.usage import Usage, failure_of
from piledriver.serve.request import Completion, RequestError, RequestOutput, TokenLogprob

ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTask:
    """One call of `/v1/chat/completions`."""

    def __init__(self, served: ServedModel, body: ChatBody) -> None:
        self.served, self.body = served, body
        self.tools = tool_use(body)
        self.prompt = encode_chat(
            served,
            body.messages,
            tools=list(self.tools.tools) if self.tools.offered else None,
            add_generation_prompt=body.add_generation_prompt,
            **(body.chat_template_kwargs or {}),
        )
        if body.truncate_prompt_tokens:
            self.prompt = self.prompt[-body.truncate_prompt_tokens :]
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs", fix="send logprobs: true", parameter="top_logprobs")
        self.params = sampling_params(
            body, max_tokens=asked, logprobs=(body.top_logprobs or 0) if body.logprobs else None
        )
        self.grammar = grammar_of(body, served.grammars)
        if self.tools.forced:
            if self.grammar is not None:
                raise RequestError(
                    "response_format and a forced tool call are both given",
                    fix="send one of them",
                    parameter="tool_choice",
                )
            self.grammar = served.grammars.json_schema(self.tools.schema(), "tools")
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def _submit(self) -> Any:
        return self.served.bridge.submit(
            self.prompt,
            self.params,
            grammar=self.grammar,
            priority=self.body.priority,
            cache_salt=self.body.cache_salt or "",
        )

    async def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        usage, observer = Usage(), self.served.metrics.observer()
        async with self._submit() as stream:
            async for final in stream.events():
                observer.see(final)
        if error := failure_of(final):
            raise error
        usage.add(final)
        choices = [self._choice(completion) for completion in final.completions]
        return self._frame("chat.completion", choices) | {"usage": usage.body()}

    def _choice(self, completion: Completion) -> dict[str, Any]:
        parser = ToolParser(self.tools)
        text = parser.push(completion.text)
        rest, calls = parser.finish()
        message: dict[str, Any] = {"role": "assistant", "content": (text + rest) or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": None if completion.logprobs is None else {"content": self._logprobs(completion.logprobs)},
            "finish_reason": "tool_calls" if calls else completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        return choice | ({"token_ids": completion.token_ids} if self.body.return_token_ids else {})

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a streamed answer."""
        usage, observer = Usage(), self.served.metrics.observer()
        parsers = [ToolParser(self.tools) for _ in range(self.params.n)]
        async with self._submit() as stream:
            for index in range(self.params.n):
                yield self._chunk(index, {"role": "assistant", "content": ""})
            async for event in stream.events():
                observer.see(event)
                if error := failure_of(event):
                    raise error
                for chunk in self._chunks(event, parsers):
                    yield chunk
        usage.add(event)
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self._frame("chat.completion.chunk", []) | {"usage": usage.body()}

    def _chunks(self, event: RequestOutput, parsers: list[ToolParser]) -> list[dict[str, Any]]:
        """Return what an event adds to each answer."""
        chunks = []
        for delta in event.deltas:
            index, ended = delta.index, delta.finish_reason
            shown = parsers[index].push(delta.text)
            calls: list[dict[str, Any]] = []
            if ended is not None:
                rest, calls = parsers[index].finish()
                shown += rest
            entries = self._logprobs(delta.logprobs) if delta.logprobs is not None else None
            tokens = list(delta.token_ids) if self.body.return_token_ids else None
            if shown or entries or tokens:
                chunks.append(self._chunk(index, {"content": shown}, logprobs=entries, token_ids=tokens))
            if calls:
                numbered = [{"index": number, **call} for number, call in enumerate(calls)]
                chunks.append(self._chunk(index, {"tool_calls": numbered}))
            if ended is not None:
                chunks.append(self._chunk(index, {}, finish_reason="tool_calls" if calls else ended))
        return chunks

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": logprobs},
            "finish_reason": finish_reason,
        }
        return self._frame("chat.completion.chunk", [choice | ({"token_ids": token_ids} if token_ids else {})])

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            self._token(entry.token, entry.logprob)
            | {"top_logprobs": [self._token(token, value) for token, value in entry.top]}
            for entry in entries
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.served.token_text(token),
            "logprob": finite(logprob),
            "bytes": list(self.served.token_bytes(token)),
        }

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": self.served.fingerprint,
            "choices": choices,
        }


def encode_chat(served: ServedModel, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """Return the tokens of a chat. The template writes every special token itself; none is added."""
    if served.chat_template is None:
        raise RequestError(
            f"the model {served.name!r} has no chat template",
            fix="use /v1/completions, or start the server with --chat-template FILE.jinja",
            parameter="messages",
        )
    if not messages:
        raise RequestError("messages is empty", fix="send at least one message", parameter="messages")
    plain = [_plain(number, message) for number, message in enumerate(messages)]
    return served.encoder.encode(served.chat_template.render(plain, **options), add_special_tokens=False)


def _plain(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content as one text."""
    if message.get("role") not in ROLES:
        raise RequestError(
            f"messages[{number}].role is {message.get('role')!r}",
            fix=f"use one of {', '.join(ROLES)}",
            parameter="messages",
        )
    content = message.get("content")
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RequestError(
                    f"messages[{number}] has a part of type {kind!r}",
                    fix="send text parts only: this model reads text",
                    parameter="messages",
                )
            parts.append(part["text"])
        content = "".join(parts)
    if content is not None and not isinstance(content, str):
        raise RequestError(
            f"messages[{number}].content is not a text", fix="send a string or text parts", parameter="messages"
        )
    role = "system" if message["role"] == "developer" else message["role"]
    plain = {**message, "role": role, "content": content if content is not None else ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_with_arguments(number, call) for call in message["tool_calls"]]
    return plain


def _with_arguments(number: int, call: Any) -> Any:
    """Return a tool call with its arguments as an object: clients send them as JSON text, templates expect values."""
    try:
        function = call["function"]
        given = function["arguments"]
        return {**call, "function": {**function, "arguments": json.loads(given) if isinstance(given, str) else given}}
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"messages[{number}].tool_calls is malformed: {error}",
            fix='send {"type": "function", "function": {"name": ..., "arguments": "{...}"}}',
            parameter="messages",
        ) from error
