"""Errors as OpenAI's JSON: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piledriver.core.errors import PiledriverError
from piledriver.serve.errors import ServeError
from piledriver.serve.request import RequestError


class ClientError(RequestError):
    """A request that is rejected with a status other than 400."""

    def __init__(self, status: int, message: str, *, fix: str, parameter: str | None = None, code: str) -> None:
        super().__init__(message, fix=fix, parameter=parameter, code=code)
        self.status = status


def client_gone() -> ClientError:
    """Return the error of a request whose client does not wait for the answer."""
    return ClientError(499, "the client has disconnected", fix="stay connected", code="client_closed_request")


def status_of(error: PiledriverError) -> int:
    """Return the HTTP status of an error: 400 unless it says otherwise, 503 if the engine has stopped."""
    if isinstance(error, ClientError):
        return error.status
    if isinstance(error, RequestError):
        return 400
    return 503 if isinstance(error, ServeError) else 500


def error_body(
    message: str, *, kind: str = "invalid_request_error", parameter: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error answer."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}


def body_of(error: PiledriverError) -> dict[str, Any]:
    """Return the body of the answer to a request that raised `error`."""
    if isinstance(error, RequestError):
        return error_body(str(error), parameter=error.parameter, code=error.code)
    return error_body(str(error), kind="server_error", code="engine_stopped")


_FIXES = {"json_invalid": "send valid JSON", "missing": "add it", "extra_forbidden": "leave it out"}


def malformed_body(errors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the body of the answer to a request whose fields have wrong types, as pydantic reports them.

    >>> wrong = {"loc": ("stop", 0, "str"), "type": "string_type", "msg": "Input should be a valid string"}
    >>> malformed_body([wrong])["error"]["message"]
    'stop: Input should be a valid string. Fix: send it as the API describes'
    """
    fields = [next((str(part) for part in error["loc"] if part != "body"), None) for error in errors]
    kind, field = errors[0]["type"], fields[0]
    # A field that takes several types has an error for each of them.
    said = dict.fromkeys(error["msg"] for error, place in zip(errors, fields, strict=True) if place == field)
    field = None if kind == "json_invalid" else field
    fix = _FIXES.get(kind, "send it as the API describes")
    return error_body(f"{field or 'body'}: {'; or: '.join(said)}. Fix: {fix}", parameter=field)
