"""The process of the HTTP server: started beside the engine's process, before the model is loaded.

It opens the tokenizer while the engine loads weights, imports no torch, and ends when the engine's process is gone.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from piledriver.core.errors import PiledriverError
from piledriver.serve.http.config import ServerConfig

if TYPE_CHECKING:
    from piledriver.serve.engine import Engine


class FrontEnd:
    """The server's process, as the engine's process sees it."""

    def __init__(self, listener: socket.socket, folder: str | Path, config: ServerConfig) -> None:
        """Start the process, which takes over the listening socket."""
        self._connection, theirs = socket.socketpair()
        command = [sys.executable, "-m", "piledriver.serve.front_end"]
        command += [str(listener.fileno()), str(theirs.fileno()), str(folder)]
        self._process = subprocess.Popen(
            command,
            pass_fds=(listener.fileno(), theirs.fileno()),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        with self._process.stdin as settings:  # not an argument: other users see those, and it has the API key
            settings.write(msgspec.json.encode(config))
        listener.close()
        theirs.close()

    def serve(self, engine: Engine, on_ready: Callable[[str], None] | None = None) -> int:
        """Serve an engine until SIGTERM or SIGINT; let running requests finish; return the exit status."""
        from piledriver.serve.ipc.engine_service import EngineService

        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
        service = EngineService(engine, self._connection)
        service.start()
        forget_loaded_objects()
        try:
            while self._process.poll() is None and not service.ready.wait(0.05):
                pass
            if service.ready.is_set() and on_ready is not None:
                on_ready(service.url)
            return self._process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.kill()
            service.close()

    def kill(self) -> None:
        """End the process at once: the engine could not be opened, or has stopped."""
        self._process.kill()
        self._process.wait()

    def _pass_on(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)


def forget_loaded_objects() -> None:
    """Let the garbage collector skip what was loaded at the start: a model's and a vocabulary's objects stay anyway."""
    gc.collect()
    gc.freeze()


def main() -> int:
    """Serve HTTP: `front_end LISTENER CONNECTION FOLDER`, with the settings on standard input."""
    from piledriver.data.tokenizer.open import open_tokenizer
    from piledriver.serve.http.served_model import open_served_model
    from piledriver.serve.http.server import serve_http
    from piledriver.serve.ipc.messages import EngineFacts, decode_report, receive_frame
    from piledriver.serve.ipc.remote_engine import RemoteEngine

    listener, connection = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    folder = sys.argv[3]
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig)
    try:
        tokenizer = open_tokenizer(folder)
        first = receive_frame(connection)
        if first is None:  # the engine could not be opened; its process says why
            return 1
        facts = decode_report(first)
        assert isinstance(facts, EngineFacts)
        engine = RemoteEngine(connection, facts, tokenizer)
        engine.on_lost = _end_soon
        forget_loaded_objects()
        serve_http(open_served_model(engine, folder, config), listener, on_ready=engine.announce)
    except PiledriverError as error:
        print(f"piledriver: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _end_soon() -> None:
    """End the process once clients have been told: the engine's process is gone."""
    threading.Timer(0.2, os._exit, (1,)).start()


if __name__ == "__main__":
    sys.exit(main())
