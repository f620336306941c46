"""Engine events in asyncio: the engine's thread hands them over, the event loop delivers them.

One wake-up of the loop delivers everything that has come since the last one, and a reader gets all its events at once.
With many open requests wake-ups are spaced out, so that a server under load sends fewer, larger pieces instead of
taking the interpreter away from the engine's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from piledriver.serve.engine import Engine
from piledriver.serve.http.errors import ClientError
from piledriver.serve.request import RequestOutput, SamplingParams
from piledriver.serve.structured.grammar import Grammar

FEW = 16
"""Open requests up to which every event is delivered at once."""
SECONDS_EACH, MOST_SECONDS = 0.0002, 0.05
"""Time between deliveries above that: about twice what sending to one client costs, for each client."""


class EventBridge:
    """Submits requests to an engine that runs in its own thread and returns their events to the event loop."""

    def __init__(self, engine: Engine, max_open: int) -> None:
        self.engine, self.max_open = engine, max_open
        self.open = 0
        """Requests that are being served or wait."""
        self._arrived: deque[tuple[EventStream, RequestOutput]] = deque()
        self._waking = False
        self._loop: asyncio.AbstractEventLoop | None = None

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
        self._loop = asyncio.get_running_loop()
        stream = EventStream(self)
        stream.request_id = self.engine.add_request(
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            constraints=[grammar.constraint() for _ in range(params.draws)] if grammar is not None else (),
            on_output=lambda event: self._hand_over(stream, event),
        )
        self.open += 1
        return stream

    def _hand_over(self, stream: EventStream, event: RequestOutput) -> None:
        """Called in the engine's thread."""
        self._arrived.append((stream, event))
        if not self._waking and self._loop is not None:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop is closed: the server has stopped
                self._waking = False

    def _wake(self) -> None:
        if self.open <= FEW:
            self._deliver()
        else:
            assert self._loop is not None
            self._loop.call_later(min(self.open * SECONDS_EACH, MOST_SECONDS), self._deliver)

    def _deliver(self) -> None:
        self._waking = False
        while self._arrived:
            stream, event = self._arrived.popleft()
            stream.put(event)


class EventStream:
    """The events of one request. Leaving the `async with` block before the end cancels the request."""

    request_id: str

    def __init__(self, bridge: EventBridge) -> None:
        self._bridge = bridge
        self._events: list[RequestOutput] = []
        self._ready = asyncio.Event()
        self._finished = False

    def put(self, event: RequestOutput) -> None:
        """Append an event and wake the reader."""
        self._events.append(event)
        self._finished |= event.finished
        self._ready.set()

    async def batches(self) -> AsyncIterator[list[RequestOutput]]:
        """Yield the events that have come since the last turn, at least one, until the request is finished."""
        done = False
        while not done:
            await self._ready.wait()
            self._ready.clear()
            events, self._events = self._events, []
            if events:
                done = events[-1].finished
                yield events

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self._bridge.open -= 1
        if not self._finished:
            self._bridge.engine.abort(self.request_id)


async def together(streams: Sequence[EventStream]) -> AsyncIterator[tuple[int, list[RequestOutput]]]:
    """Yield (number of the stream, its new events) as they come, until all streams are finished."""
    if len(streams) == 1:  # the usual case needs no further tasks
        async for events in streams[0].batches():
            yield 0, events
        return
    waiting: asyncio.Queue[tuple[int, list[RequestOutput] | None]] = asyncio.Queue()

    async def pump(number: int, stream: EventStream) -> None:
        async for events in stream.batches():
            waiting.put_nowait((number, events))
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
