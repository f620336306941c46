"""Bodies of requests: OpenAI's fields, and further ones in vLLM's spelling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def unknown(self) -> list[str]:
        """Return the fields that the server does not know."""
        return sorted(self.model_extra or {})


class StreamOptions(BaseModel):
    """What a stream sends beside the answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class StructuredOutputs(BaseModel):
    """What the answer must match; exactly one of the fields."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    json_schema: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingBody(_Body):
    """Fields that completions and chats share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Integer | None = None
    stop: str | list[str] | None = None
    seed: Integer | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # vLLM's spelling
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    truncate_prompt_tokens: Annotated[Integer, Field(ge=1)] | None = None
    cache_salt: str | None = None
    priority: Integer = 0
    structured_outputs: StructuredOutputs | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None


class CompletionBody(SamplingBody):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    add_special_tokens: bool = True
    max_tokens: Integer | None = None
    best_of: Integer | None = None
    echo: bool = False
    logprobs: Integer | None = None
    prompt_logprobs: Integer | None = None
    suffix: str | None = None


class ResponseFormat(BaseModel):
    """Form of a chat answer: free text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatBody(SamplingBody):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(_Body):
    """Body of `/tokenize`: a prompt, or messages that the chat template renders."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(_Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]
