"""`ChatTemplate`: messages to a prompt, by the Jinja template of a model folder.

Templates are programs by strangers: they run in Jinja's immutable sandbox, which reaches no file, module or attribute
that is not data.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from piledriver.core.errors import UsageError
from piledriver.serve.request import RequestError

TEMPLATE_FILE = "chat_template.jinja"


class ChatTemplate:
    """A compiled chat template.

    >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}\\n{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hello"}])
    '[user] Hello\\n'
    """

    def __init__(self, source: str, tokens: dict[str, str] | None = None, *, name: str = "chat template") -> None:
        """Compile `source`; `tokens` are the special tokens that it names, such as `bos_token`."""
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}`, which marks the assistant's part for training, has no effect here."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: jinja2.parser.Parser) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise, strftime_now=lambda text: datetime.now().strftime(text))
        self.source, self.tokens = source, dict(tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError(f"{name}: {error}", fix="give a Jinja chat template") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt that asks for the next message; raise `RequestError` with the template's own reason."""
        import jinja2

        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise RequestError(
                f"the chat template rejects these messages: {error}",
                fix="order and fill the messages as this model's template expects",
                parameter="messages",
            ) from error


def find_chat_template(folder: str | Path) -> ChatTemplate | None:
    """Return the chat template of a model folder (`chat_template.jinja` or `tokenizer_config.json`), or None."""
    path = Path(folder)
    settings = read_tokenizer_settings(path)
    tokens = {key: token_text(value) for key, value in settings.items() if key.endswith("_token") and value}
    own = path / TEMPLATE_FILE
    if own.exists():
        return ChatTemplate(own.read_text(encoding="utf-8"), tokens, name=str(own))
    source = settings.get("chat_template")
    if isinstance(source, list):  # several by name; the default is the one for chats
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return None if not isinstance(source, str) else ChatTemplate(source, tokens, name=f"{path}/tokenizer_config.json")


def read_tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `tokenizer_config.json`, empty if it has none."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", fix="repair or remove the file") from error
    return found if isinstance(found, dict) else {}


def token_text(token: Any) -> str:
    """Return the text of a special token, which files give as a string or as an object with its `content`."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes characters of HTML, which models have not seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
