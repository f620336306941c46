"""Load on a running server: time to first token, inter-token latency and throughput, as clients see them.

Closed loop: a number of clients, each of which sends its next request when the last one is answered. Open loop:
requests arrive at a rate whatever the server does (exponential gaps), which is what shows queueing.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from piledriver.core.errors import PiledriverError, UsageError


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """What is sent."""

    requests: int = 200
    """Requests in all."""
    clients: int = 16
    """Concurrent clients of the closed loop; the open loop has no such limit."""
    rate: float | None = None
    """Requests per second of the open loop; None for the closed loop."""
    prompt_tokens: int = 128
    """Tokens of a prompt."""
    answer_tokens: int = 128
    """Tokens of an answer; end tokens are ignored."""
    shared_prefix: float = 0.0
    """Share of the prompt that all requests have in common."""
    seed: int = 0
    """Seed of prompts and arrivals."""

    def __post_init__(self) -> None:
        for name in ("requests", "clients", "prompt_tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", fix="give a whole number from 1 up")
        if self.rate is not None and self.rate <= 0:
            raise UsageError(f"rate is {self.rate}", fix="give requests per second over 0")
        if not 0 <= self.shared_prefix <= 1:
            raise UsageError(f"shared_prefix is {self.shared_prefix}", fix="give a share from 0 to 1")


@dataclass
class LoadResult:
    """What clients saw."""

    seconds: float = 0.0
    tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the figures: milliseconds, tokens and requests per second."""
        done = len(self.first_token_s)
        return {
            "requests": done,
            "errors": len(self.errors),
            "seconds": round(self.seconds, 6),
            "requests_per_s": round(done / self.seconds, 2) if self.seconds else 0.0,
            "tokens_per_s": round(self.tokens / self.seconds, 1) if self.seconds else 0.0,
            "first_token_ms": _percentiles(self.first_token_s),
            "between_tokens_ms": _percentiles(self.between_tokens_s),
        }


def run_load(url: str, config: LoadConfig, *, api_key: str = "") -> LoadResult:
    """Send requests to the server at `url` and return what clients saw; raise an error if no request succeeds."""
    result = asyncio.run(_run(url, config, api_key))
    if result.errors and not result.first_token_s:
        raise PiledriverError(f"{url}: every request failed: {result.errors[0]}", fix="look at the server's output")
    return result


async def _run(url: str, config: LoadConfig, api_key: str) -> LoadResult:
    info = await _get(url, "/tokenizer_info", api_key)
    luck, result = random.Random(config.seed), LoadResult()
    words = range(min(int(info["vocab_size"]), 50_000))
    common = round(config.shared_prefix * config.prompt_tokens)
    prefix = luck.choices(words, k=common)
    prompts = [prefix + luck.choices(words, k=config.prompt_tokens - common) for _ in range(config.requests)]

    async def send(prompt: list[int], connection: Connection) -> None:
        body = {
            "prompt": prompt,
            "max_tokens": config.answer_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "seed": config.seed,
        }
        try:
            await _observe(connection, body, result)
        except (OSError, ValueError, asyncio.IncompleteReadError, PiledriverError) as error:
            connection.close()
            result.errors.append(f"{type(error).__name__}: {error}")

    started = time.perf_counter()
    if config.rate is None:
        left = iter(prompts)

        async def client() -> None:
            connection = Connection(url, api_key)
            for prompt in left:
                await send(prompt, connection)
            connection.close()

        await asyncio.gather(*(client() for _ in range(config.clients)))
    else:

        async def visitor(prompt: list[int]) -> None:
            connection = Connection(url, api_key)
            await send(prompt, connection)
            connection.close()

        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(visitor(prompt))
                await asyncio.sleep(luck.expovariate(config.rate))
    result.seconds = time.perf_counter() - started
    return result


async def _observe(connection: Connection, body: dict[str, Any], result: LoadResult) -> None:
    started, last = time.perf_counter(), 0.0
    async for line in connection.events("/v1/completions", body):
        now, chunk = time.perf_counter(), json.loads(line)
        if "error" in chunk:
            raise PiledriverError(chunk["error"]["message"])
        count = sum(len(choice.get("token_ids", ())) for choice in chunk["choices"])
        if not count:
            continue
        if last:
            result.between_tokens_s += [(now - last) / count] * count
        else:
            result.first_token_s.append(now - started)
        last = now
        result.tokens += count


class Connection:
    """A connection of one client, which is kept open between its requests as OpenAI's clients keep theirs."""

    def __init__(self, url: str, api_key: str = "") -> None:
        place = urlsplit(url)
        if place.scheme != "http" or not place.hostname:
            raise UsageError(f"{url!r} is not the URL of a server", fix="give a URL such as http://127.0.0.1:8000")
        self._host, self._port, self._key = place.hostname, place.port or 80, api_key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Send a request and yield the data of its server-sent events, up to `[DONE]`."""
        reader, status, _ = await self.request("POST", path, json.dumps(body).encode())
        if status != 200:
            raise PiledriverError(f"status {status}: {(await reader.read(4096)).decode(errors='replace')}")
        async for line in reader:  # chunk sizes are lines of their own, which are no events
            if line == b"0\r\n":  # the last chunk
                await reader.readline()
                return
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield line[6:].strip()

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[asyncio.StreamReader, int, int]:
        """Send a request; return the reader of its answer's body, its status, and the bytes of a body of one piece."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
        reader, writer = self._streams
        key = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{key}"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        length = 0
        while line := (await reader.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return reader, status, length

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def _get(url: str, path: str, api_key: str) -> Any:
    connection = Connection(url, api_key)
    try:
        reader, status, length = await connection.request("GET", path)
        body = await reader.readexactly(length)
    except OSError as error:
        raise UsageError(f"no server answers at {url}: {error}", fix="start `piledriver serve MODEL` first") from error
    finally:
        connection.close()
    if status != 200:
        raise UsageError(f"{url}{path} answers with status {status}", fix="give the URL of a piledriver server")
    return json.loads(body)


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: round(1000 * ordered[int(share * len(ordered))], 3) for name, share in shares.items()}
