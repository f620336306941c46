"""The official client: completions and chats, whole, streamed and asynchronous, tools, structured answers, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pydantic
import pytest

from piledriver.cli.main import main
from tests.serve.http.conftest import Server

openai = pytest.importorskip("openai", reason="the official client is not installed")
pytestmark = pytest.mark.slow

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
            "required": ["a"],
        },
    },
}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_streamed_completion_is_the_whole_one(client: Any) -> None:
    asked = {"model": "tiny", "prompt": ["Once upon", "The"], "max_tokens": 12, "seed": 5, "n": 2}
    whole = client.completions.create(**asked)
    texts = {choice.index: choice.text for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2, 3]
    assert texts[0] != texts[1]
    streamed = dict.fromkeys(texts, "")
    usage = None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
        usage = chunk.usage or usage
    assert streamed == texts
    assert usage is not None
    assert (usage.completion_tokens, usage.prompt_tokens) == (whole.usage.completion_tokens, whole.usage.prompt_tokens)


def test_echo_scores_every_token_of_the_prompt(client: Any) -> None:
    def scored(**fields: Any) -> Any:
        return client.completions.create(model="tiny", prompt="The quick fox", echo=True, logprobs=1, **fields).choices[
            0
        ]

    one, zero = scored(max_tokens=1, temperature=0), scored(max_tokens=0)
    assert zero.text == "The quick fox"
    assert one.text.startswith(zero.text)
    assert one.logprobs.token_logprobs[0] is None
    assert one.logprobs.token_logprobs[:-1] == zero.logprobs.token_logprobs
    assert "".join(one.logprobs.tokens) == one.text
    last = one.logprobs
    assert last.token_logprobs[-1] == max(last.top_logprobs[-1].values()), "greedy: equal, not only close"


def test_chat_streams_what_it_says(client: Any) -> None:
    asked = {
        "model": "tiny",
        "messages": HELLO,
        "max_completion_tokens": 10,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"skip_special_tokens": False},
    }
    whole = client.chat.completions.create(**asked)
    [choice] = whole.choices
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    assert b"".join(bytes(t.bytes) for t in choice.logprobs.content).decode(errors="replace") == choice.message.content
    pieces = [part.choices[0].delta for part in client.chat.completions.create(**asked, stream=True)]
    assert pieces[0].role == "assistant"
    assert "".join(piece.content or "" for piece in pieces) == choice.message.content


class Answer(pydantic.BaseModel):
    colour: str = pydantic.Field(max_length=5)
    count: int = pydantic.Field(ge=0, le=9)


def test_parse_gives_an_object(client: Any) -> None:
    found = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Answer, seed=2)
    assert isinstance(found.choices[0].message.parsed, Answer)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_must_be_called_are(client: Any, choice: Any, stream: bool) -> None:
    asked = {"model": "tiny", "messages": HELLO, "tools": [TOOL], "tool_choice": choice, "seed": 4}
    if stream:
        chunks = [part.choices[0] for part in client.chat.completions.create(**asked, stream=True)]
        [call] = [call for part in chunks for call in part.delta.tool_calls or ()]
        reason = chunks[-1].finish_reason
    else:
        whole = client.chat.completions.create(**asked).choices[0]
        (call, *_), reason = whole.message.tool_calls, whole.finish_reason
    assert reason == "tool_calls"
    assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert list(arguments) == ["a"], "a function has the parameters that it declares"
    assert 0 <= arguments["a"] <= 99


def test_many_at_once_answer_as_alone(server: Server) -> None:
    async def ask(client: Any, seed: int) -> str:
        answer = await client.completions.create(model="tiny", prompt="Once", max_tokens=8, seed=seed)
        return str(answer.choices[0].text)

    async def everything() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            together = await asyncio.gather(*(ask(client, seed) for seed in range(12)))
            assert together == [await ask(client, seed) for seed in range(12)]

    asyncio.run(everything())


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-9' is not served here"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError, match="the context holds 1024") as error:
        client.completions.create(model="tiny", prompt="a", max_tokens=10_000)
    assert error.value.code == "context_length_exceeded"


def test_a_load_of_both_kinds_is_measured(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompt-tokens", "16", "--answer-tokens", "4", "--requests", "6", "--json"]
    for words in (["--clients", "3"], ["--rate", "50", "--shared-prefix", "0.5"]):
        assert main(["bench", "serve", "--url", server.url, *sizes, *words]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["requests"], found["errors"]) == (6, 0)
        assert found["tokens_per_s"] * found["seconds"] == pytest.approx(24, rel=0.01)
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 2
    assert "start `piledriver serve MODEL` first" in capsys.readouterr().err
