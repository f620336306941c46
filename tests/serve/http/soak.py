"""Clients that vanish, and many requests, against a live server: blocks come back, memory stays flat.

    python -m tests.serve.http.soak --clients 1000 --requests 10000

prints one JSON line. The tests call `vanish` with fewer clients.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from piledriver.serve.background import start_server
from piledriver.serve.load import LoadConfig, run_load

_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def vanish(url: str, clients: int, seed: int = 4) -> int:
    """Connect this many clients that leave at a random moment, streaming or not; return how many did."""
    luck = random.Random(seed)
    host, port = url.removeprefix("http://").split(":")
    for number in range(clients):
        fields = {"prompt": "Once upon a time", "max_tokens": 200, "stream": number % 2 == 0, "ignore_eos": True}
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body[: luck.choice([len(body), len(body), 10])])
            time.sleep(luck.uniform(0, 0.03))
    return clients


def blocks_in_use(url: str, patience_s: float = 60.0) -> float:
    """Return the sum of running and waiting requests and the share of blocks in use, once it is 0 or after a while."""
    deadline = time.monotonic() + patience_s
    while True:
        lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
        left = sum(float(line.split()[-1]) for line in lines if line.startswith(_GAUGES))
        if left == 0 or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def main() -> None:
    from tests.serve.http.conftest import make_folder

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        server = start_server(make_folder(Path(name) / "model"), ["--port", "0"], log=Path(name) / "log")
        process = psutil.Process(server.pid)

        def resident() -> int:
            return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))

        try:
            load = LoadConfig(requests=500, clients=16, prompt_tokens=20, answer_tokens=4)
            run_load(server.url, load)
            memory = [resident()]
            vanish(server.url, args.clients)
            left = blocks_in_use(server.url)
            memory.append(resident())
            errors = 0
            for part in range(4):
                many = LoadConfig(
                    requests=args.requests // 4, clients=16, prompt_tokens=20, answer_tokens=4, seed=part + 1
                )
                errors += len(run_load(server.url, many).errors)
                memory.append(resident())
        finally:
            server.stop()
    figures = {
        "clients": args.clients,
        "requests": args.requests,
        "errors": errors,
        "left": left,
        "rss_mb": [round(size / 1e6, 1) for size in memory],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
