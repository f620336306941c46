"""Answers as server-sent events, and clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from piledriver.core.errors import PiledriverError
from piledriver.serve.http.errors import body_of, client_gone

_Chunk = dict[str, Any]


class DisconnectWatch:
    """Cancels the task of a request when its client disconnects: frameworks do that for streams only."""

    def __init__(self, request: Request) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._request, self._task, self._gone = request, task, False
        self._watcher = asyncio.create_task(self._watch())

    async def unless_gone(self, answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """Await an answer; raise an error with status 499 if the client disconnects, and close if there is an error."""
        try:
            return await answer
        except asyncio.CancelledError:
            self.close()
            if not self.is_cause():
                raise
            raise client_gone() from None
        except BaseException:
            self.close()
            raise

    def is_cause(self) -> bool:
        """Return whether the task was cancelled by this watch; the cancellation then counts as handled."""
        if self._gone:
            self._task.uncancel()
        return self._gone

    def close(self) -> None:
        """Stop watching."""
        self._watcher.cancel()

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


class EventStreamResponse(Response):
    """Server-sent events. An error before the first chunk has a status; a later one is an event of its own."""

    media_type = "text/event-stream"

    def __init__(
        self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None], watch: DisconnectWatch
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first, self._rest, self._watch = first, rest, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events; end early when the client has disconnected."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send(_part(_event(self._first)))
            try:
                async for chunk in self._rest:
                    await send(_part(_event(chunk)))
            except* PiledriverError as group:
                error: BaseException = group
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                assert isinstance(error, PiledriverError)
                await send(_part(_event(body_of(error))))
            await send(_part(b"data: [DONE]\n\n", more=False))
        except asyncio.CancelledError:
            if not self._watch.is_cause():
                raise
        finally:
            self._watch.close()
            await self._rest.aclose()  # cancels a request that is not finished


def _part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
