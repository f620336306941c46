"""`make_app`: the routes of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from piledriver.core.errors import PiledriverError, UsageError, nearest
from piledriver.serve.http.chat import ChatTask, encode_chat
from piledriver.serve.http.completions import CompletionTask
from piledriver.serve.http.errors import ClientError, body_of, error_body, status_of
from piledriver.serve.http.guards import Guards
from piledriver.serve.http.schema import ChatBody, CompletionBody, DetokenizeBody, SamplingBody, TokenizeBody
from piledriver.serve.http.served_model import ServedModel
from piledriver.serve.request import RequestError

_log = logging.getLogger("piledriver.serve")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def make_app(served: ServedModel) -> Any:
    """Return the ASGI application of a served model."""
    app = FastAPI(title="piledriver", version=_version(), docs_url=None, redoc_url=None)
    _add_errors(app)
    _add_completions(app, served)
    _add_tokens(app, served)
    _add_status(app, served)
    return Guards(app, served.config)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(PiledriverError)
    async def rejected(_: Request, error: PiledriverError) -> JSONResponse:
        if isinstance(error, UsageError) and not isinstance(error, RequestError):
            return JSONResponse(error_body(str(error)), 400)
        headers = {"Retry-After": "1"} if status_of(error) in (429, 503) else None
        return JSONResponse(body_of(error), status_of(error), headers=headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse(error_body(f"{place or 'body'}: {first['msg']}", parameter=place or None), 400)

    @app.exception_handler(HTTPException)
    async def missing(_: Request, error: HTTPException) -> JSONResponse:
        code = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}.get(error.status_code)
        return JSONResponse(error_body(str(error.detail), code=code), error.status_code)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        _log.error("a request failed", exc_info=error)
        return JSONResponse(error_body(f"{type(error).__name__}: {error}", kind="server_error"), 500)


def _add_completions(app: FastAPI, served: ServedModel) -> None:
    def check(body: SamplingBody) -> None:
        served.check_name(body.model)
        unknown = body.unknown()
        if unknown and not served.config.ignore_unknown_fields:
            close = nearest(unknown[0], type(body).model_fields)
            raise RequestError(
                f"unknown field {unknown[0]!r}",
                fix=f"did you mean {close!r}?" if close else "leave it out, or start with --ignore-unknown-fields",
                parameter=unknown[0],
            )

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        check(body)
        task = CompletionTask(served, body)
        if body.stream:
            return await _streamed(request, task.stream())
        return JSONResponse(await _unless_gone(request, task.answer()))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        check(body)
        task = ChatTask(served, body)
        if body.stream:
            return await _streamed(request, task.stream())
        return JSONResponse(await _unless_gone(request, task.answer()))


def _add_tokens(app: FastAPI, served: ServedModel) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        served.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give a prompt or messages", fix="send exactly one of them", parameter="prompt")
        if body.messages is not None:
            tokens = encode_chat(served, body.messages, add_generation_prompt=body.add_generation_prompt)
        else:
            special = body.add_special_tokens is not False
            tokens = served.encoder.encode(body.prompt or "", add_special_tokens=special)
        found: dict[str, Any] = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": served.engine.facts.max_context,
        }
        return found | ({"token_strs": [served.token_text(t) for t in tokens]} if body.return_token_strs else {})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        served.check_name(body.model)
        size = served.tokenizer.vocab_size
        wrong = [token for token in body.tokens if not 0 <= token < size]
        if wrong:
            raise RequestError(f"token {wrong[0]} does not exist", fix=f"send 0 to {size - 1}", parameter="tokens")
        return {"prompt": served.tokenizer.decode(body.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        names = served.chat_template.tokens if served.chat_template else {}
        by_id = {token: name for name, token in served.tokenizer.specials.items()}
        ends = [by_id[token] for token in sorted(served.engine.eos) if token in by_id]
        return {
            "tokenizer_class": "tokenizer" + served.tokenizer.suffix,
            "vocab_size": served.tokenizer.vocab_size,
            "bos_token": by_id.get(served.encoder.bos) if served.encoder.bos is not None else None,
            "eos_token": ends[0] if ends else None,
            "chat_template": served.chat_template.source if served.chat_template else None,
            **{key: value for key, value in names.items() if key not in ("bos_token", "eos_token")},
        }


def _add_status(app: FastAPI, served: ServedModel) -> None:
    page = Path(__file__).with_name("page.html").read_text("utf-8")

    @app.get("/")
    async def root() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "piledriver",
            "max_model_len": served.engine.facts.max_context,
        }
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        served.check_name(name)
        return dict((await models())["data"][0])

    @app.get("/health")
    async def health() -> JSONResponse:
        failure = served.engine.failure
        if failure is not None:
            return JSONResponse({"status": "failed", "reason": failure}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def server_version() -> dict[str, str]:
        return {"version": _version()}

    @app.get("/metrics")
    async def metrics() -> Response:
        text, kind = served.metrics.text()
        return Response(text, media_type=kind)


async def _streamed(request: Request, chunks: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """Return server-sent events. An error before the first chunk has a status; a later one is an event of its own."""
    first = await _unless_gone(request, anext(chunks))

    async def lines() -> AsyncIterator[bytes]:
        yield _event(first)
        try:
            async for chunk in chunks:
                yield _event(chunk)
        except* PiledriverError as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            assert isinstance(error, PiledriverError)
            yield _event(body_of(error))
        yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _unless_gone(request: Request, answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Await an answer, and cancel it when the client disconnects: frameworks do that for streams only."""
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise ClientError(499, "the client has disconnected", fix="stay connected", code="client_closed_request")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _version() -> str:
    try:
        return version("piledriver")
    except PackageNotFoundError:  # a source tree that is not installed
        return "unknown"
