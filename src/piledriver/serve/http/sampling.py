"""Fields of a request body as `SamplingParams` and grammar."""

from __future__ import annotations

import json
import secrets
from typing import Any

from piledriver.serve.http.schema import ChatBody, CompletionBody, SamplingBody, StructuredOutputs
from piledriver.serve.request import RequestError, SamplingParams
from piledriver.serve.structured.grammar import Grammar, GrammarCompiler

MAX_TOP_LOGPROBS = 100
MAX_ANSWERS = 128


def sampling_params(body: SamplingBody, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Return the sampling parameters of a body; fields that were not sent have OpenAI's defaults."""
    prompt_logprobs = body.prompt_logprobs if isinstance(body, CompletionBody) else None
    best_of = body.best_of if isinstance(body, CompletionBody) else None
    for name, count, most in (
        ("logprobs", logprobs, MAX_TOP_LOGPROBS),
        ("prompt_logprobs", prompt_logprobs, MAX_TOP_LOGPROBS),
        ("n", body.n, MAX_ANSWERS),
        ("best_of", best_of, MAX_ANSWERS),
    ):
        if count is not None and count > most:
            raise RequestError(f"{name} is {count}", fix=f"ask for at most {most}", parameter=name)
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k == -1 else body.top_k,  # vLLM's word for all tokens
        "min_p": body.min_p,
        "n": body.n,
        "min_tokens": body.min_tokens,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "stop": body.stop,
        "stop_token_ids": body.stop_token_ids,
        "best_of": best_of,
        "logit_bias": None if body.logit_bias is None else _bias(body.logit_bias),
        "logprobs_mode": body.logprobs_mode,
    }
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        # Without a seed every request draws anew.
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        include_stop=body.include_stop_str_in_output,
        **{name: value for name, value in given.items() if value is not None},
    )


def grammar_of(body: SamplingBody, compiler: GrammarCompiler) -> Grammar | None:
    """Return what the answer must match, or None for free text."""
    asked = body.structured_outputs
    if isinstance(body, ChatBody) and body.response_format is not None and body.response_format.type != "text":
        if asked is not None:
            raise RequestError(
                "response_format and structured_outputs are both given",
                fix="send one of them",
                parameter="response_format",
            )
        if body.response_format.type == "json_object":
            return compiler.json_object()
        schema = (body.response_format.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise RequestError(
                "response_format.json_schema has no schema",
                fix='send {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
                parameter="response_format",
            )
        return compiler.json_schema(schema)
    return None if asked is None else _structured(asked, compiler)


def _structured(asked: StructuredOutputs, compiler: GrammarCompiler) -> Grammar:
    given = [name for name in ("json_schema", "regex", "choice", "grammar") if getattr(asked, name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs has {len(given)} of json, regex, choice and grammar",
            fix="send exactly one",
            parameter="structured_outputs",
        )
    if asked.json_schema is not None:
        schema = asked.json_schema
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise RequestError(
                    f"structured_outputs.json is not JSON: {error}",
                    fix="send the schema as an object",
                    parameter="structured_outputs",
                ) from error
        assert isinstance(schema, dict | bool)
        return compiler.json_schema(schema, "structured_outputs")
    if asked.regex is not None:
        return compiler.regex(asked.regex)
    if asked.choice is not None:
        return compiler.choice(asked.choice)
    assert asked.grammar is not None
    return compiler.lark(asked.grammar)


def _bias(given: dict[str, float]) -> dict[int, float]:
    try:
        bias = {int(token): float(value) for token, value in given.items()}
    except ValueError as error:
        raise RequestError(
            f"logit_bias: {error}", fix="use token ids as keys and numbers as values", parameter="logit_bias"
        ) from error
    wrong = [value for value in bias.values() if not -100 <= value <= 100]
    if wrong:
        raise RequestError(
            f"logit_bias has the value {wrong[0]}", fix="use values from -100 to 100", parameter="logit_bias"
        )
    return bias
