"""Requests that are rejected, limits, disconnects and the end of the server."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from piledriver.serve.http.app import make_app
from piledriver.serve.http.config import ServerConfig
from piledriver.serve.http.served_model import open_served_model
from piledriver.serve.ipc.engine_service import EngineService
from piledriver.serve.ipc.messages import EngineFacts, decode_report, receive_frame
from piledriver.serve.ipc.remote_engine import RemoteEngine
from piledriver.serve.offline import open_engine
from tests.patience import HANG_S
from tests.serve.http.conftest import Server
from tests.serve.http.soak import blocks_in_use, vanish

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
BAD: list[tuple[str, dict[str, Any], str, str | None]] = [
    (TEXT, {}, "prompt: Field required", "prompt"),
    (TEXT, {"prompt": ""}, "the prompt is empty", "prompt"),
    (TEXT, {"prompt": []}, "0 prompts", "prompt"),
    (TEXT, {"prompt": [[]]}, "the prompt is empty", "prompt"),
    (TEXT, {"prompt": [999999]}, "prompt has token 999999", "prompt"),
    (TEXT, {"prompt": 5}, "prompt", None),
    (TEXT, {"prompt": "a", "max_tokens": -1}, "max_tokens is -1", "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 9999}, "the context holds 1024", "prompt"),
    (TEXT, {"prompt": "a" * 2000}, "the context holds 1024", "prompt"),
    (TEXT, {"prompt": "a", "temperature": -1}, "temperature is -1", "temperature"),
    (TEXT, {"prompt": "a", "top_p": 2}, "top_p is 2", "top_p"),
    (TEXT, {"prompt": "a", "top_k": -5}, "top_k is -5", "top_k"),
    (TEXT, {"prompt": "a", "min_p": 7}, "min_p is 7", "min_p"),
    (TEXT, {"prompt": "a", "n": 0}, "n is 0", "n"),
    (TEXT, {"prompt": "a", "n": 10**9}, "n is 1000000000. Fix: ask for at most 128", "n"),
    (TEXT, {"prompt": ["a"] * 100, "n": 100}, "100 prompts with 100 answers each", "n"),
    (TEXT, {"prompt": "a", "seed": 2**70}, "seed: Input should be less than", "seed"),
    (TEXT, {"prompt": [1.5]}, "valid string; or: Input should be a valid integer", "prompt"),
    (TEXT, {"prompt": "a", "n": 3, "best_of": 2}, "best_of 2 is less than n 3", "n"),
    (TEXT, {"prompt": "a", "presence_penalty": 3}, "presence_penalty is 3", "presence_penalty"),
    (TEXT, {"prompt": "a", "frequency_penalty": -3}, "frequency_penalty is -3", "frequency_penalty"),
    (TEXT, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty is 0", "repetition_penalty"),
    (TEXT, {"prompt": "a", "logprobs": 1000}, "logprobs is 1000", "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": -1}, "logprobs is -1", "logprobs"),
    (TEXT, {"prompt": "a", "stop": [""]}, "a stop string is empty", "stop"),
    (TEXT, {"prompt": "a", "stop_token_ids": [-4]}, "stop_token_ids has token -4", "stop_token_ids"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"5": 1000}}, "the value 1000", "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias has token 999999", "logit_bias"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix is not supported", "suffix"),
    (TEXT, {"prompt": "a", "echo": True, "stream": True}, "echo cannot be streamed", "echo"),
    (TEXT, {"prompt": "a", "max_tokns": 5}, "did you mean 'max_tokens'?", "max_tokns"),
    (TEXT, {"prompt": "a", "structured_outputs": {}}, "has 0 of json", "structured_outputs"),
    (TEXT, {"prompt": "a", "structured_outputs": {"regex": "a("}}, "regular expression", "structured_outputs"),
    (TEXT, {"prompt": "a", "structured_outputs": {"choice": []}}, "it is empty", "structured_outputs"),
    (TEXT, {"prompt": "a", "structured_outputs": {"grammar": "start: %%"}}, "grammar", "structured_outputs"),
    (TEXT, {"prompt": "a", "structured_outputs": {"json": "{"}}, "is not JSON", "structured_outputs"),
    (TEXT, {"prompt": "a", "structured_outputs": {"json": {"type": "nothing"}}}, "schema", "structured_outputs"),
    (CHAT, {}, "messages: Field required", "messages"),
    (CHAT, {"messages": []}, "messages is empty", "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role is 'king'", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "is not a text", "messages"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls is malformed", "messages"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs needs logprobs", "top_logprobs"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "without tools", "tool_choice"),
    (CHAT, {"messages": HELLO, "tools": [{}]}, "tools[0] is not a function", "tools"),
    (CHAT, {"messages": HELLO, "tool_choice": {"function": {"name": "f"}}}, "names 'f'", "tool_choice"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "has no schema", "response_format"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format", None),
    ("/tokenize", {}, "give a prompt or messages", "prompt"),
    ("/detokenize", {"tokens": [999999]}, "token 999999 does not exist", "tokens"),
]

# (path, body, number of choices, tokens of all answers together; None for any)
GOOD: list[tuple[str, dict[str, Any], int, int | None]] = [
    (TEXT, {"prompt": "Once"}, 1, None),
    (TEXT, {"prompt": ["Once", "The"], "max_tokens": 3, "ignore_eos": True}, 2, 6),
    (TEXT, {"prompt": [40, 41, 42], "max_tokens": 2, "ignore_eos": True}, 1, 2),
    (TEXT, {"prompt": [[40], [41, 42]], "max_tokens": 2, "ignore_eos": True}, 2, 4),
    (TEXT, {"prompt": "Once", "n": 3, "max_tokens": 2, "ignore_eos": True, "seed": 4}, 3, 6),
    (TEXT, {"prompt": "Once", "n": 1, "best_of": 3, "max_tokens": 2, "ignore_eos": True}, 1, None),
    (TEXT, {"prompt": "Once", "temperature": 0, "max_tokens": 4, "ignore_eos": True, "user": "someone"}, 1, 4),
    (TEXT, {"prompt": "Once", "top_k": 3, "top_p": 0.5, "min_p": 0.1, "max_tokens": 4, "ignore_eos": True}, 1, 4),
    (TEXT, {"prompt": "Once", "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.2}, 1, None),
    (TEXT, {"prompt": "Once", "logit_bias": {"40": 100}, "max_tokens": 3, "ignore_eos": True}, 1, 3),
    (TEXT, {"prompt": "Once", "stop": "e", "max_tokens": 50}, 1, None),
    (TEXT, {"prompt": "Once", "stop": ["e", "t"], "include_stop_str_in_output": True, "max_tokens": 50}, 1, None),
    (TEXT, {"prompt": "Once", "stop_token_ids": [40, 41, 42], "max_tokens": 50}, 1, None),
    (TEXT, {"prompt": "Once", "min_tokens": 5, "max_tokens": 5}, 1, 5),
    (TEXT, {"prompt": "Once", "echo": True, "max_tokens": 1, "logprobs": 2, "ignore_eos": True}, 1, 1),
    (TEXT, {"prompt": "Once", "prompt_logprobs": 1, "logprobs": 0, "max_tokens": 2, "ignore_eos": True}, 1, 2),
    (TEXT, {"prompt": "Once", "return_token_ids": True, "add_special_tokens": False, "max_tokens": 1}, 1, 1),
    (TEXT, {"prompt": "a" * 900, "truncate_prompt_tokens": 20, "max_tokens": 1}, 1, 1),
    (TEXT, {"prompt": "Once", "cache_salt": "mine", "priority": 3, "max_tokens": 1}, 1, 1),
    (TEXT, {"prompt": "Once", "skip_special_tokens": False, "max_tokens": 4}, 1, None),
    (CHAT, {"messages": HELLO, "max_tokens": 3, "ignore_eos": True}, 1, 3),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 3, "ignore_eos": True, "n": 2}, 2, 6),
    (CHAT, {"messages": [{"role": "system", "content": "Be brief."}, *HELLO], "max_tokens": 2}, 1, None),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 2}, 1, None),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 3, "max_tokens": 2, "ignore_eos": True}, 1, 2),
    (CHAT, {"messages": HELLO, "response_format": {"type": "text"}, "max_tokens": 2}, 1, None),
]


@pytest.fixture(scope="module")
def app(folder: Path) -> Any:
    """The application in this process: guards and limits need no network."""
    engine = open_engine(folder, max_sequences=4)
    assert engine.tokenizer is not None
    mine, theirs = socket.socketpair()
    service = EngineService(engine, theirs)
    service.start()
    facts = decode_report(receive_frame(mine) or b"")
    assert isinstance(facts, EngineFacts)
    config = ServerConfig(api_key="sesame", max_body_bytes=20_000, max_queue=3)
    yield make_app(open_served_model(RemoteEngine(mine, facts, engine.tokenizer), folder, config))
    service.close()
    mine.close()


def call(app: Any, method: str, path: str, key: str | None = "sesame", **options: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, path, headers=headers, **options)

    return asyncio.run(ask())


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body", "choices", "tokens"), GOOD, ids=lambda value: str(value)[:40])
def test_what_can_be_asked_is_answered(
    post: Any, path: str, body: dict[str, Any], choices: int, tokens: int | None
) -> None:
    answer = post(path, **body)
    assert sorted(choice["index"] for choice in answer["choices"]) == list(range(choices))
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}
    assert tokens is None or answer["usage"]["completion_tokens"] == tokens
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(("path", "body", "said", "parameter"), BAD, ids=lambda value: str(value)[:40])
def test_what_cannot_be_served_is_one_line_with_the_field(
    app: Any, path: str, body: dict[str, Any], said: str, parameter: str | None
) -> None:
    answer = call(app, "POST", path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    if parameter is not None:
        assert error["param"] == parameter


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/"), ("GET", "/health"), ("GET", "/metrics"), ("POST", TEXT), ("GET", "/nothing")]
)
def test_the_key_guards_every_route(app: Any, method: str, path: str) -> None:
    for wrong in (None, "", "sesam"):
        answer = call(app, method, path, key=wrong)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_the_page_takes_the_key_from_its_address(app: Any) -> None:
    answer = call(app, "GET", "/?key=sesame", key=None)
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "http://" not in answer.text, "it needs nothing from anywhere else"


def test_bodies_and_queues_have_limits(app: Any) -> None:
    too_long = call(app, "POST", TEXT, json={"prompt": "a" * 30_000})
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (413, "body_too_large")

    async def chunks() -> Any:
        for _ in range(4):
            yield b"[" * 10_000

    assert call(app, "POST", TEXT, content=chunks()).status_code == 413
    assert call(app, "POST", TEXT, content=b"{").status_code == 400

    async def flood() -> list[int]:
        headers = {"Authorization": "Bearer sesame"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}
            asked = (client.post(TEXT, json=body, headers=headers, timeout=HANG_S) for _ in range(8))
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    codes = asyncio.run(flood())
    assert set(codes) == {200, 429}
    assert codes.count(200) >= 3


@pytest.mark.slow
def test_tokens_and_templates(post: Any, server: Server) -> None:
    found = post("/tokenize", prompt="naïve café 🙂", return_token_strs=True)
    assert post("/detokenize", tokens=found["tokens"])["prompt"] == "naïve café 🙂"
    assert found["count"] == len(found["token_strs"])
    chat = post("/tokenize", messages=HELLO)
    assert post("/detokenize", tokens=chat["tokens"])["prompt"].endswith("assistant\n")
    info = httpx.get(f"{server.url}/tokenizer_info", timeout=HANG_S).json()
    assert (info["eos_token"], info["bos_token"]) == ("<|endoftext|>", None)
    assert "im_start" in info["chat_template"]


@pytest.mark.slow
def test_answers_keep_to_their_grammar(post: Any) -> None:
    def text(**wish: Any) -> str:
        return str(post(TEXT, prompt="a", max_tokens=60, seed=1, structured_outputs=wish)["choices"][0]["text"])

    assert text(choice=["yes", "no", "perhaps"]) in ("yes", "no", "perhaps")
    number = text(regex=r"[1-9][0-9]{2}")
    assert len(number) == 3
    assert number.isdigit()
    assert text(grammar='start: "x" "y"+ "z"').replace("y", "") == "xz"
    found = json.loads(text(json={"enum": [1, "two", None]}))
    assert found in (1, "two", None)


@pytest.mark.slow
def test_phases_of_requests_are_measured_under_vllms_names(post: Any, server: Server) -> None:
    post(TEXT, prompt="Once upon", max_tokens=3, ignore_eos=True)
    phases = ("request_queue_time", "request_prefill_time", "request_decode_time", "time_to_first_token")
    for name in (*(f"{phase}_seconds" for phase in phases), "iteration_tokens_total", "request_prompt_tokens"):
        assert server.metric(f"vllm:{name}_count") >= 1, name
    assert server.metric("vllm:iteration_tokens_total_sum") >= server.metric("vllm:generation_tokens_total")
    assert server.metric("vllm:num_preemptions_total") == 0


@pytest.mark.slow
def test_clients_that_leave_free_their_blocks(server: Server) -> None:
    """Streaming or not, in any phase: what they asked for is not computed any longer."""
    assert vanish(server.url, clients=60) == 60
    assert blocks_in_use(server.url) == 0


@pytest.mark.slow
def test_sigterm_lets_requests_finish_and_a_kill_leaves_no_port(folder: Path) -> None:
    server = Server(folder)
    body = {"prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}{TEXT}", json=body, timeout=HANG_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.stop() == 0
    again = Server(folder, "--port", server.url.rsplit(":", 1)[1])
    again.process.kill()
    again.process.wait()
    assert again.process.stdout is not None
    again.process.stdout.close()
    deadline = time.monotonic() + HANG_S  # the server's process ends when it finds the engine's gone
    while True:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                free.bind(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
