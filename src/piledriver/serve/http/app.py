"""`make_app`: the routes of the server."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from piledriver.core.errors import PiledriverError, UsageError, nearest
from piledriver.serve.http.chat import ChatTask, encode_chat
from piledriver.serve.http.completions import CompletionTask
from piledriver.serve.http.errors import body_of, client_gone, error_body, malformed_body, status_of
from piledriver.serve.http.event_stream import DisconnectWatch, EventStreamResponse
from piledriver.serve.http.guards import Guards
from piledriver.serve.http.schema import ChatBody, CompletionBody, DetokenizeBody, SamplingBody, TokenizeBody
from piledriver.serve.http.served_model import ServedModel
from piledriver.serve.request import RequestError

_Body = TypeVar("_Body", bound=SamplingBody)
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
        return JSONResponse(malformed_body(error.errors()), 400)

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

    async def answered(request: Request, task: CompletionTask | ChatTask) -> Response:
        watch = DisconnectWatch(request)
        if task.body.stream:
            chunks = task.stream()
            return EventStreamResponse(await watch.unless_gone(anext(chunks)), chunks, watch)
        try:
            return JSONResponse(await watch.unless_gone(task.answer()))
        finally:
            watch.close()

    async def completions(request: Request) -> Response:
        body = await _parsed(request, CompletionBody)
        check(body)
        return await answered(request, CompletionTask(served, body))

    async def chat(request: Request) -> Response:
        body = await _parsed(request, ChatBody)
        check(body)
        return await answered(request, ChatTask(served, body))

    # Plain routes: what the framework does for each call (dependencies, bodies read as JSON and then as models) would
    # take longer than serving it.
    app.add_route("/v1/completions", completions, methods=["POST"])
    app.add_route("/v1/chat/completions", chat, methods=["POST"])


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
        return JSONResponse({"status": "ok", "prepared": served.engine.prepared})

    @app.get("/version")
    async def server_version() -> dict[str, str]:
        return {"version": _version()}

    @app.get("/metrics")
    async def metrics() -> Response:
        text, kind = served.metrics.text()
        return Response(text, media_type=kind)


async def _parsed(request: Request, kind: type[_Body]) -> _Body:
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error
    except ClientDisconnect:
        raise client_gone() from None


def _version() -> str:
    try:
        return version("piledriver")
    except PackageNotFoundError:  # a source tree that is not installed
        return "unknown"
