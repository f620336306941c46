"""Structured output: whatever is drawn under a constraint is valid, for real schemas; others are rejected at once."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.serve.request import RequestError
from piledriver.serve.structured.grammar import Grammar, GrammarCompiler
from tests.serve.http.conftest import make_folder

pytest.importorskip("llguidance", reason="llguidance is not installed (extra `serve`)")
SHARED = Path(__file__).parents[4] / "shared" / "json-schemas" / "schemas.jsonl.zst"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = open_tokenizer(make_folder(tmp_path_factory.mktemp("grammar") / "tiny"))
    return GrammarCompiler(tokenizer, 320, frozenset([tokenizer.special("<|endoftext|>")]))


def drawn(compiler: GrammarCompiler, grammar: Grammar, luck: random.Random, limit: int = 400) -> str | None:
    """A text by random choice among the allowed tokens, which ends as soon as it may; None if it is too long."""
    constraint, tokens = grammar.constraint(), []
    end = compiler._tokenizer.special("<|endoftext|>")
    for _ in range(limit):
        mask = np.zeros(10, dtype=np.int32)
        constraint.fill_mask(mask)
        allowed = [t for t in range(320) if mask[t // 32] >> (t % 32) & 1]
        assert allowed
        token = end if end in allowed else luck.choice(allowed)
        if luck.random() < 0.1:  # a rejected draft leaves no trace
            constraint.accept(luck.choice(allowed))
            constraint.rollback(1)
        constraint.accept(token)
        if token != end:
            tokens.append(token)
        if token == end or constraint.finished:
            return compiler._tokenizer.decode(tokens)
    return None


def test_texts_match_what_was_asked(compiler: GrammarCompiler) -> None:
    luck = random.Random(2)
    for _ in range(20):
        assert drawn(compiler, compiler.choice(["left", "right"]), luck) in ("left", "right")
        number = drawn(compiler, compiler.regex("-?[0-9]{1,3}"), luck)
        assert number is not None
        assert -1000 < int(number) < 1000
        item = drawn(
            compiler, compiler.json_schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}), luck
        )
        assert item is not None
        assert all(isinstance(value, bool) for value in json.loads(item))


def test_masks_of_several_answers_are_those_of_each_and_an_error_is_its_own(compiler: GrammarCompiler) -> None:
    word, number, broken = (grammar.constraint() for grammar in [compiler.regex(p) for p in ("[a-c]+", "[0-9]+", "x")])
    with pytest.raises(RequestError):
        broken.accept(5)
    together, alone = np.zeros((3, 10), dtype=np.int32), np.zeros((2, 10), dtype=np.int32)
    errors = type(word).fill_masks({0: word, 1: broken, 2: number}, together)
    word.fill_mask(alone[0])
    number.fill_mask(alone[1])
    assert np.array_equal(together[[0, 2]], alone)
    assert alone[0].any()
    assert list(errors) == [1]


@pytest.mark.parametrize(
    ("make", "value"),
    [("json_schema", {"type": "nothing"}), ("json_schema", {"$ref": "#/nowhere"}), ("regex", "("), ("lark", "start")],
)
def test_what_is_malformed_is_rejected_before_it_is_served(compiler: GrammarCompiler, make: str, value: Any) -> None:
    with pytest.raises(RequestError, match="cannot be used"):
        getattr(compiler, make)(value)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs the real schemas in ../shared")
def test_every_text_under_a_real_schema_is_valid(compiler: GrammarCompiler) -> None:
    zstandard, jsonschema = pytest.importorskip("zstandard"), pytest.importorskip("jsonschema")
    with SHARED.open("rb") as file:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), "utf-8").readlines()
    luck, accepted, finished = random.Random(7), 0, 0
    for entry in map(json.loads, lines):
        try:
            grammar = compiler.json_schema(entry["schema"])
        except RequestError:
            continue
        accepted += 1
        text = drawn(compiler, grammar, luck)
        if text is not None:
            finished += 1
            kind = jsonschema.validators.validator_for(entry["schema"])
            kind(entry["schema"]).validate(json.loads(text))
    assert accepted >= 150, accepted
    assert finished >= 60, finished
