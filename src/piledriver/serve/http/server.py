"""`serve_http`: run the server until it is told to stop; running requests finish first."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable

from piledriver.core.errors import MissingDependencyError, UsageError
from piledriver.serve.http.config import ServerConfig
from piledriver.serve.http.served_model import ServedModel

_ACCEPTS = 16
"""Connections accepted in one turn of the event loop."""


def open_socket(config: ServerConfig) -> socket.socket:
    """Return a bound socket, so that a taken port is an error before the model is loaded."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen at {config.host}:{config.port}: {error.strerror or error}",
            fix="choose another --port, or stop the program that uses it",
        ) from error
    return listener


def serve_http(served: ServedModel, listener: socket.socket, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve requests until SIGTERM or SIGINT; then accept none, let running ones finish, and return."""
    try:
        import uvicorn
    except ImportError as error:
        raise MissingDependencyError("uvicorn", extra="serve", purpose="the HTTP server") from error
    from piledriver.serve.http.app import make_app

    settings = uvicorn.Config(
        make_app(served),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=served.config.drain_seconds,
        server_header=False,
    )

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            served.engine.attach()
            await super().startup(sockets)
            if on_ready is not None:
                host, port = listener.getsockname()[:2]
                on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    # uvloop accepts one connection for each turn of the loop and each handle of the socket, which under load would
    # make clients wait longer for their connection than for their answer.
    listeners = [listener, *(listener.dup() for _ in range(_ACCEPTS - 1))]
    before = {}
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal again when it has stopped; a server that was asked to stop and did ends with 0.
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        Server(settings).run(sockets=listeners)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in listeners:
            each.close()
