"""`mii.serve` and `mii.client`: a server in another process, found by its deployment name."""

from __future__ import annotations

import getpass
import json
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from piledriver.compat.mii.response import Response
from piledriver.compat.mii.settings import MODEL_KEYS, SERVER_KEYS, generation_settings, model_settings
from piledriver.core.errors import PiledriverError, UsageError
from piledriver.core.storage import write_bytes
from piledriver.serve.background import BackgroundServer, start_server


def serve(
    model_name_or_path: str = "",
    model_config: Mapping[str, Any] | None = None,
    mii_config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> MIIClient:
    """Start a server in the background and return a client of it; other programs find it with `client(name)`."""
    merged = {**(mii_config or {}), **kwargs}
    settings = model_settings(model_name_or_path, model_config, merged, MODEL_KEYS | SERVER_KEYS)
    folder = settings["model_name_or_path"]
    name = settings.get("deployment_name") or Path(folder).name
    record = _record(name)
    log = record.with_suffix(".log")
    port = settings.get("restful_api_port") or settings.get("port_number") or 0
    words = ["--port", str(port), "--name", name]
    if settings.get("max_length"):
        words += ["--max-context", str(settings["max_length"])]
    server = start_server(folder, words, log=log)
    write_bytes(str(record), json.dumps({"url": server.url, "pid": server.pid}).encode())
    return MIIClient(name, server)


def client(model_or_deployment_name: str) -> MIIClient:
    """Return a client of a running deployment."""
    name = Path(model_or_deployment_name).name
    record = _record(name)
    if not record.exists():
        raise UsageError(f"no deployment is named {name!r}", fix="start it with mii.serve")
    found = json.loads(record.read_bytes())
    return MIIClient(name, BackgroundServer(found["url"], found["pid"]))


class MIIClient:
    """Sends prompts to a deployment."""

    def __init__(self, name: str, server: BackgroundServer) -> None:
        self.name, self.server = name, server

    def __call__(self, *args: Any, **kwargs: Any) -> list[Response]:
        return self.generate(*args, **kwargs)

    def generate(
        self,
        prompts: str | Sequence[str],
        streaming_fn: Callable[[list[Response]], None] | None = None,
        **generation: Any,
    ) -> list[Response]:
        """Return a `Response` for each prompt; `streaming_fn` gets the pieces as they come, for one prompt."""
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        if streaming_fn is not None and len(asked) > 1:
            raise UsageError("streaming_fn takes one prompt", fix="call generate once for each prompt")
        return [self._one(prompt, streaming_fn, generation) for prompt in asked]

    def terminate_server(self) -> None:
        """Let running requests finish and stop the server."""
        self.server.stop()
        _record(self.name).unlink(missing_ok=True)

    def _one(
        self, prompt: str, streaming_fn: Callable[[list[Response]], None] | None, generation: Mapping[str, Any]
    ) -> Response:
        length = len(json.loads(self._post("/tokenize", {"prompt": prompt}).read())["tokens"])
        fields = {key: value for key, value in generation_settings(generation, length).items() if value is not None}
        body = {"prompt": prompt, **fields, "stream": streaming_fn is not None, "return_token_ids": True}
        full = bool(generation.get("return_full_text", False))
        if streaming_fn is None:
            choice = json.loads(self._post("/v1/completions", body).read())["choices"][0]
            text = prompt + choice["text"] if full else choice["text"]
            return Response(text, length, len(choice["token_ids"]), choice["finish_reason"])
        whole = Response(prompt if full else "", length, 0, "none")
        for choice in self._events(body):
            piece = Response(choice["text"], length, len(choice["token_ids"]), choice["finish_reason"] or "none")
            whole.generated_text += piece.generated_text
            whole.generated_length += piece.generated_length
            whole.finish_reason = piece.finish_reason
            streaming_fn([piece])
        return whole

    def _events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for line in self._post("/v1/completions", body):
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise PiledriverError(chunk["error"]["message"])
                yield from chunk["choices"]

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            self.server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            raise PiledriverError(json.loads(error.read())["error"]["message"]) from error
        except urllib.error.URLError as error:
            raise PiledriverError(
                f"the deployment {self.name!r} does not answer at {self.server.url}: {error.reason}",
                fix="start it again with mii.serve",
            ) from error


def _record(name: str) -> Path:
    """Return the file that says where a deployment listens, in a folder that only this user can write."""
    if not name or "/" in name or name.startswith("."):
        raise UsageError(f"{name!r} is not a deployment name", fix="use letters, digits, '-' and '_'")
    folder = Path(tempfile.gettempdir()) / f"piledriver-mii-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise UsageError(f"{folder} belongs to another user", fix="set TMPDIR to a folder of yours")
    return folder / f"{name}.json"
