"""Events of requests in asyncio: a reader waits for news of its request and takes all of it at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from piledriver.serve.http.errors import ClientError
from piledriver.serve.ipc.remote_engine import RemoteEngine, RemoteRequest
from piledriver.serve.request import RequestOutput, SamplingParams
from piledriver.serve.structured.grammar import Grammar


class EventBridge:
    """Submits requests to an engine, up to a number of open ones."""

    def __init__(self, engine: RemoteEngine, max_open: int) -> None:
        self.engine, self.max_open = engine, max_open
        self.open = 0
        """Requests that are being served or wait."""

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        grammar: Grammar | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> EventStream:
        """Queue a request and return its events; raise `RequestError` if it cannot be served or the queue is full."""
        if self.open >= self.max_open:
            raise ClientError(
                429,
                f"{self.open} requests are being served or wait",
                fix="try again later, or raise --max-queue",
                code="queue_full",
            )
        news = asyncio.Event()
        request = self.engine.submit(
            prompt, params, grammar=grammar, priority=priority, cache_salt=cache_salt, wake=news.set
        )
        self.open += 1
        return EventStream(self, request, news)


class EventStream:
    """The events of one request. Leaving the `async with` block before the end cancels the request."""

    def __init__(self, bridge: EventBridge, request: RemoteRequest, news: asyncio.Event) -> None:
        self._bridge, self._request, self._news = bridge, request, news

    async def events(self) -> AsyncIterator[RequestOutput]:
        """Yield what has come since the last turn as one event, until the request is finished."""
        finished = False
        while not finished:
            await self._news.wait()
            self._news.clear()
            event = self._request.take()
            if event is not None:
                finished = event.finished
                yield event

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._bridge.open -= 1
        self._bridge.engine.abort(self._request)


async def together(streams: Sequence[EventStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield (number of the stream, its new event) as they come, until all streams are finished."""
    if len(streams) == 1:  # the usual case needs no further tasks
        async for event in streams[0].events():
            yield 0, event
        return
    waiting: asyncio.Queue[tuple[int, RequestOutput | None]] = asyncio.Queue()

    async def pump(number: int, stream: EventStream) -> None:
        async for event in stream.events():
            waiting.put_nowait((number, event))
        waiting.put_nowait((number, None))

    async with asyncio.TaskGroup() as group:
        for number, stream in enumerate(streams):
            group.create_task(pump(number, stream))
        left = len(streams)
        while left:
            number, found = await waiting.get()
            if found is None:
                left -= 1
            else:
                yield number, found
