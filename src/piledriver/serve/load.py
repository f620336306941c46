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
            "seconds": round(self.seconds, 3),
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

    async def send(prompt: list[int]) -> None:
        body = {
            "prompt": prompt,
            "max_tokens": config.answer_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "seed": config.seed,
        }
        try:
            await _observe(url, body, api_key, result)
        except (OSError, ValueError, asyncio.IncompleteReadError, PiledriverError) as error:
            result.errors.append(f"{type(error).__name__}: {error}")

    started = time.perf_counter()
    if config.rate is None:
        left = iter(prompts)

        async def client() -> None:
            for prompt in left:
                await send(prompt)

        await asyncio.gather(*(client() for _ in range(config.clients)))
    else:
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(send(prompt))
                await asyncio.sleep(luck.expovariate(config.rate))
    result.seconds = time.perf_counter() - started
    return result


async def _observe(url: str, body: dict[str, Any], api_key: str, result: LoadResult) -> None:
    started, last = time.perf_counter(), 0.0
    async for line in _stream(url, "/v1/completions", body, api_key):
        if line == b"[DONE]":
            break
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


async def _stream(url: str, path: str, body: dict[str, Any], api_key: str) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events."""
    reader, writer = await _request(url, "POST", path, api_key, json.dumps(body).encode())
    try:
        status = await _status(reader)
        if status != 200:
            raise PiledriverError(f"status {status}: {(await reader.read(4096)).decode(errors='replace')}")
        async for line in reader:  # chunk sizes are lines of their own, which are no events
            if line.startswith(b"data: "):
                yield line[6:].strip()
                if line.startswith(b"data: [DONE]"):
                    return
    finally:
        writer.close()


async def _get(url: str, path: str, api_key: str) -> Any:
    try:
        reader, writer = await _request(url, "GET", path, api_key)
    except OSError as error:
        raise UsageError(f"no server answers at {url}: {error}", fix="start `piledriver serve MODEL` first") from error
    try:
        status = await _status(reader)
        body = await reader.read()
    finally:
        writer.close()
    if status != 200:
        raise UsageError(f"{url}{path} answers with status {status}", fix="give the URL of a piledriver server")
    return json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])


async def _request(
    url: str, method: str, path: str, api_key: str, body: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(url)
    if place.scheme != "http" or not place.hostname:
        raise UsageError(f"{url!r} is not the URL of a server", fix="give a URL such as http://127.0.0.1:8000")
    reader, writer = await asyncio.open_connection(place.hostname, place.port or 80, limit=1 << 22)
    key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n{key}"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def _status(reader: asyncio.StreamReader) -> int:
    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        pass
    return status


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: round(1000 * ordered[int(share * len(ordered))], 3) for name, share in shares.items()}
