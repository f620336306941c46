"""ASGI middleware in front of every route: API key, body size, request id."""

from __future__ import annotations

import hmac
import json
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException

from piledriver.serve.http.config import ServerConfig
from piledriver.serve.http.errors import error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guards:
    """Rejects requests without the API key (401) and with too large bodies (413), and numbers every answer."""

    def __init__(self, app: App, config: ServerConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {key.lower(): value for key, value in scope["headers"]}
        identity = headers.get(b"x-request-id", uuid.uuid4().hex.encode())[:128]

        async def numbered(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", identity)]
            await send(message)

        if self._config.api_key and not self._has_key(scope, headers):
            await _answer(numbered, 401, "the API key is missing or wrong", "authentication_error", "invalid_api_key")
            return
        limit = self._config.max_body_bytes
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > limit:
            await _answer(numbered, 413, f"the body exceeds {limit} bytes", "invalid_request_error", "body_too_large")
            return
        seen = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:  # sent in chunks, without a declared length
                raise HTTPException(413, f"the body exceeds {limit} bytes")
            return message

        await self._app(scope, counted, numbered)

    def _has_key(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"")
        sent = given[7:] if given[:7].lower() == b"bearer " else b""
        if not sent and scope["path"] == "/":  # a browser cannot add a header to the address of the page
            sent = parse_qs(scope.get("query_string", b"")).get(b"key", [b""])[0]
        return hmac.compare_digest(sent, self._config.api_key.encode())


async def _answer(send: Send, status: int, message: str, kind: str, code: str) -> None:
    body = json.dumps(error_body(message, kind=kind, code=code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
