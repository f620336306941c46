"""Answers over a socket, read at any moments, are those of the engine itself."""

from __future__ import annotations

import asyncio
import random
import socket
from pathlib import Path

import pytest

from piledriver.serve import RequestOutput, SamplingParams
from piledriver.serve.ipc.engine_service import EngineService
from piledriver.serve.ipc.messages import (
    Abort,
    EngineFacts,
    FrameReader,
    decode_command,
    decode_report,
    frame,
    receive_frame,
)
from piledriver.serve.ipc.remote_engine import RemoteEngine
from piledriver.serve.offline import open_engine
from tests.serve.http.conftest import make_folder

PARAMS = [
    SamplingParams(max_tokens=24, seed=1),
    SamplingParams(max_tokens=40, seed=2, stop=("e", "th"), min_tokens=3),
    SamplingParams(max_tokens=40, seed=3, stop=("o",), include_stop=True, logprobs=2),
    SamplingParams(max_tokens=40, seed=4, stop_token_ids=tuple(range(40, 90))),
    SamplingParams(max_tokens=12, seed=5, n=3, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=12, seed=6, n=1, best_of=3, prompt_logprobs=1),
]


def test_frames_are_found_however_the_stream_is_cut() -> None:
    sent = [Abort(number * 1000) for number in range(50)]
    stream, reader, found = b"".join(map(frame, sent)), FrameReader(), []
    luck = random.Random(0)
    while stream:
        count = luck.randint(1, 12)
        found += [decode_command(body) for body in reader.feed(stream[:count])]
        stream = stream[count:]
    assert found == sent


def test_pieces_of_answers_concatenate_to_the_engines_own(tmp_path: Path) -> None:
    engine = open_engine(make_folder(tmp_path / "model"))
    assert engine.tokenizer is not None
    prompt = [int(token) for token in engine.tokenizer.encode("Once upon a time")]
    expected = engine.generate([prompt] * len(PARAMS), PARAMS)
    mine, theirs = socket.socketpair()
    service = EngineService(engine, theirs)
    service.start()
    facts = decode_report(receive_frame(mine) or b"")
    assert isinstance(facts, EngineFacts)
    remote = RemoteEngine(mine, facts, engine.tokenizer)
    luck = random.Random(1)

    async def ask(params: SamplingParams) -> tuple[RequestOutput, dict[int, str], dict[int, list[int]]]:
        news = asyncio.Event()
        request = remote.submit(prompt, params, wake=news.set)
        texts: dict[int, str] = {}
        tokens: dict[int, list[int]] = {}
        while True:
            await news.wait()
            news.clear()
            await asyncio.sleep(luck.choice([0.0, 0.0, 0.02]))  # more may come before it is taken
            event = request.take()
            for delta in event.deltas if event is not None else ():
                texts[delta.index] = texts.get(delta.index, "") + delta.text
                tokens.setdefault(delta.index, []).extend(delta.token_ids)
            if event is not None and event.finished:
                return event, texts, tokens

    async def all_of_them() -> list[tuple[RequestOutput, dict[int, str], dict[int, list[int]]]]:
        return await asyncio.wait_for(asyncio.gather(*map(ask, PARAMS)), 60)

    try:
        found = asyncio.run(all_of_them())
    finally:
        service.close()
        mine.close()
    for params, theirs_, (event, texts, tokens) in zip(PARAMS, expected, found, strict=True):
        assert [c.token_ids for c in event.completions] == [c.token_ids for c in theirs_.completions]
        for one, other in zip(event.completions, theirs_.completions, strict=True):
            assert (one.text, one.finish_reason, one.stop_reason) == (
                other.text,
                other.finish_reason,
                other.stop_reason,
            )
            assert [entry.token for entry in one.logprobs or ()] == [entry.token for entry in other.logprobs or ()]
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)
            if params.draws == params.n:
                assert texts[one.index] == one.text
                assert tokens[one.index] == one.token_ids
        assert len(event.prompt_logprobs or ()) == (len(prompt) if params.prompt_logprobs is not None else 0)
