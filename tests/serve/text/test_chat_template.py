"""Chat templates: real ones render as transformers renders them; hostile ones reach nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piledriver.core.errors import UsageError
from piledriver.serve.request import RequestError
from piledriver.serve.text.chat_template import ChatTemplate, find_chat_template

SHARED = Path(__file__).parents[4] / "shared" / "chat-templates"
CHAT = [
    {"role": "user", "content": "What is 2 + 2? <b>"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "naïve 東京"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs the real templates in ../shared")
def test_real_templates_render_as_in_transformers() -> None:
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    seen = 0
    for path in sorted(SHARED.glob("*.jinja")):
        facts = json.loads(path.with_suffix(".json").read_text())
        tokens = {key: facts[key] for key in ("bos_token", "eos_token") if facts[key]}
        template = ChatTemplate(path.read_text(), tokens, name=path.name)
        tools = TOOLS if facts["supports_tools"] else None
        system = [{"role": "system", "content": "Be brief."}] if facts["supports_system"] else []
        for messages in (CHAT[:1], [*system, *CHAT]):
            # Its own rendering fills in a date as ours does; both run within the same day.
            [theirs], _ = rendering.render_jinja_template(
                [messages], tools=tools, chat_template=path.read_text(), add_generation_prompt=True, **tokens
            )
            assert template.render(messages, tools=tools) == theirs, path.name
            seen += 1
    assert seen >= 64


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include 'file' %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content / 2 }}",
    ],
)
def test_a_template_reaches_only_its_data(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template rejects these messages"):
        ChatTemplate(source).render(CHAT)


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    assert find_chat_template(tmp_path) is None
    settings: dict[str, Any] = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}a"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = find_chat_template(tmp_path)
    assert found is not None
    assert found.render(CHAT) == "<s>a"
    settings["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert (found := find_chat_template(tmp_path)) is not None
    assert found.render(CHAT) == "d"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
    assert (found := find_chat_template(tmp_path)) is not None
    assert found.render(CHAT) == "<s>file"
    with pytest.raises(UsageError, match="give a Jinja chat template"):
        ChatTemplate("{% if %}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        find_chat_template(tmp_path)
