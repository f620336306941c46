"""Messages between the HTTP server and the engine: MessagePack in frames of a socket."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from piledriver.serve.request import FinishReason, SamplingParams, TokenLogprob, TopLogprobs

_LENGTH = struct.Struct("<I")


class Submit(msgspec.Struct, tag=0, array_like=True):
    """A request."""

    request: int
    prompt: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    grammar: str | None
    """What the answers must match, in llguidance's form."""


class Abort(msgspec.Struct, tag=1, array_like=True):
    """Cancel a request."""

    request: int


class Ready(msgspec.Struct, tag=2, array_like=True):
    """The server listens."""

    url: str


Command = Submit | Abort | Ready


class EngineFacts(msgspec.Struct, tag=0, array_like=True):
    """What the server must know about the engine; its first message."""

    max_context: int
    vocab_size: int
    eos: list[int]
    blocks: int
    fingerprint: str


class Ended(msgspec.Struct, array_like=True):
    """An answer has ended."""

    request: int
    index: int
    reason: FinishReason
    stop_reason: int | str | None
    silent_end: bool
    """Whether the last token is not part of the text."""


class Finished(msgspec.Struct, array_like=True):
    """A request has ended, with all of its answers."""

    request: int
    cached_tokens: int
    error: str | None
    prompt_logprobs: list[TokenLogprob | None] | None


class Outputs(msgspec.Struct, tag=1, array_like=True):
    """What the steps since the last message made. Row i is a token of an answer."""

    requests: list[int]
    indices: list[int]
    """Which answer of the request it is."""
    tokens: list[int]
    logprobs: list[float]
    tops: dict[int, TopLogprobs]
    """By row, where they were asked for."""
    scheduled: dict[int, float]
    """By request: when it left the queue, with its first token."""
    ended: list[Ended]
    finished: list[Finished]
    step_tokens: list[int]
    """Tokens of each step."""
    preempted: int
    running: int
    waiting: int
    free_blocks: int


class Failed(msgspec.Struct, tag=2, array_like=True):
    """The engine has stopped."""

    reason: str


class AllPrepared(msgspec.Struct, tag=3, array_like=True):
    """Kernels and graphs of all batch sizes are ready."""


Report = EngineFacts | Outputs | Failed | AllPrepared

_encoder = msgspec.msgpack.Encoder()
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def frame(message: Command | Report) -> bytes:
    """Return a message with its length before it."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts what arrives on a stream into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are complete with these bytes."""
        buffer, start, found = self._buffer, 0, []
        buffer += data
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            found.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return found


def receive_frame(connection: Any) -> bytes | None:
    """Wait for the first frame of a blocking socket; None if it was closed."""
    head = _read(connection, _LENGTH.size)
    return None if head is None else _read(connection, _LENGTH.unpack(head)[0])


def _read(connection: Any, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            return None
        data += piece
    return data
