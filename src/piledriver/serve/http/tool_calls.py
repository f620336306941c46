"""Tools: which calls an answer makes.

With `tool_choice` "required" or a named function, a grammar makes the answer a JSON list of calls. With "auto" the
model writes calls in the form that its chat template taught it; the usual forms are recognised.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from piledriver.serve.http.schema import ChatBody
from piledriver.serve.request import RequestError
from piledriver.serve.text.stop_strings import overlap

OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
"""Texts that begin a call: Hermes and Qwen, Mistral, Llama 3.1 (JSON and functions)."""
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties"})
"""Keywords that may declare properties elsewhere."""
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)(?:</function>|$)", re.DOTALL)


@dataclass(frozen=True)
class ToolUse:
    """What a chat may call."""

    tools: tuple[dict[str, Any], ...]
    choice: str
    """none, auto, required, or the name of a function."""
    parallel: bool

    @property
    def offered(self) -> bool:
        """Whether the model is told of the tools."""
        return bool(self.tools) and self.choice != "none"

    @property
    def forced(self) -> bool:
        """Whether the answer must be calls."""
        return self.offered and self.choice != "auto"

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of a forced answer: a list of calls."""
        wanted = [tool["function"] for tool in self.tools if self.choice in ("required", tool["function"]["name"])]
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": _only_declared(function.get("parameters") or {"type": "object"}),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for function in wanted
        ]
        only_one = not self.parallel or self.choice != "required"
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({"maxItems": 1} if only_one else {})}


def _only_declared(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments without further ones, unless it says that it takes them.

    JSON schema allows any further property by default; a function has the parameters that it declares.
    """
    if "properties" not in parameters or _COMBINING.intersection(parameters):
        return parameters
    return {"additionalProperties": False, **parameters}


def tool_use(body: ChatBody) -> ToolUse:
    """Return the tools of a chat; raise `RequestError` where they are malformed."""
    names = []
    for number, tool in enumerate(body.tools or ()):
        function = tool.get("function")
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if tool.get("type") != "function" or not named:
            raise RequestError(
                f"tools[{number}] is not a function",
                fix='send {"type": "function", "function": {"name": ..., "parameters": {...}}}',
                parameter="tools",
            )
        names.append(str(tool["function"]["name"]))
    choice: Any = body.tool_choice if body.tool_choice is not None else ("auto" if names else "none")
    if isinstance(choice, dict):
        choice = (choice.get("function") or {}).get("name")
        if choice not in names:
            raise RequestError(
                f"tool_choice names {choice!r}, which is not among the tools",
                fix=f"name one of {', '.join(names) or '(there are none)'}",
                parameter="tool_choice",
            )
    elif choice not in ("none", "auto", "required"):
        raise RequestError(
            f"tool_choice is {choice!r}", fix="send none, auto, required or a function", parameter="tool_choice"
        )
    if choice == "required" and not names:
        raise RequestError("tool_choice is required without tools", fix="send tools", parameter="tool_choice")
    return ToolUse(tuple(body.tools or ()), choice, body.parallel_tool_calls is not False)


class ToolParser:
    """Separates an answer into text and calls as it is written."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._held = ""
        self._inside = use.forced

    def push(self, text: str) -> str:
        """Take a piece of the answer; return the text that is certainly not part of a call."""
        if not self._use.offered:
            return text
        self._held += text
        if self._inside:
            return ""
        starts = [at for opening in OPENINGS if (at := self._held.find(opening)) >= 0]
        if starts:
            self._inside = True
            shown, self._held = self._held[: min(starts)], self._held[min(starts) :]
            return shown
        if self._held.lstrip().startswith("{"):  # Llama 3 writes a bare JSON object
            return ""
        keep = max((overlap(self._held, opening) for opening in OPENINGS), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the rest of the text, and the calls. A text that only looks like a call is returned as text."""
        if not self._held.strip() or not self._use.offered:
            return self._held, []
        names = {tool["function"]["name"] for tool in self._use.tools}
        calls = [call for call in _find_calls(self._held) if call["function"]["name"] in names]
        return ("", calls) if calls else (self._held, [])


def _find_calls(text: str) -> list[dict[str, Any]]:
    found: list[tuple[Any, Any]] = []
    for name, arguments in _FUNCTION.findall(text):
        found.append((name, _json(arguments)))
    for body in _HERMES.findall(text):
        found += _calls_in(_json(body))
    if not found:
        plain = text.removeprefix("[TOOL_CALLS]").removeprefix("<|python_tag|>").strip()
        found += _calls_in(_json(plain))
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for name, arguments in found
        if isinstance(name, str) and arguments is not None
    ]


def _calls_in(value: Any) -> Sequence[tuple[Any, Any]]:
    entries = value if isinstance(value, list) else [value]
    return [
        (entry.get("name"), entry.get("arguments", entry.get("parameters", {})))
        for entry in entries
        if isinstance(entry, dict)
    ]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
