"""`ServedModel`: the engine with everything that the routes need to know about its model."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from piledriver.core.errors import UsageError
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.serve.http.config import ServerConfig
from piledriver.serve.http.errors import ClientError
from piledriver.serve.http.events import EventBridge
from piledriver.serve.http.metrics import ServerMetrics
from piledriver.serve.ipc.remote_engine import RemoteEngine
from piledriver.serve.structured.grammar import GrammarCompiler
from piledriver.serve.text.chat_template import ChatTemplate, find_chat_template, read_tokenizer_settings, token_text
from piledriver.serve.text.prompt_encoder import PromptEncoder


@dataclass(eq=False)
class ServedModel:
    """A model that is being served."""

    engine: RemoteEngine
    config: ServerConfig
    name: str
    tokenizer: Tokenizer
    encoder: PromptEncoder
    chat_template: ChatTemplate | None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.bridge = EventBridge(self.engine, self.config.max_queue)
        self.metrics = ServerMetrics(self.name, self.engine)
        self.fingerprint = self.engine.facts.fingerprint
        """Checksum of the model's config, a sample of every weight and the engine's settings."""
        self.grammars = GrammarCompiler(self.tokenizer, self.engine.facts.vocab_size, self.engine.eos)

    def check_name(self, asked: str | None) -> None:
        """Raise an error with status 404 if a request names another model."""
        if asked is not None and asked != self.name:
            raise ClientError(
                404,
                f"the model {asked!r} is not served here",
                fix=f"ask for {self.name!r}",
                parameter="model",
                code="model_not_found",
            )

    def token_text(self, token: int) -> str:
        """Return the text of one token; bytes that are no character in OpenAI's form `bytes:\\xe2`."""
        piece = self.token_bytes(token)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token."""
        return self._special_names.get(token) or self.tokenizer.decode_bytes([token])

    @cached_property
    def _special_names(self) -> dict[int, bytes]:
        return {token: name.encode() for name, token in self.tokenizer.specials.items()}


def open_served_model(engine: RemoteEngine, folder: str | Path, config: ServerConfig) -> ServedModel:
    """Return the served model of a folder whose engine was opened."""
    settings = read_tokenizer_settings(Path(folder))
    bos = token_text(settings.get("bos_token"))
    # Only a tokenizer that adds the token itself was used so in training; others name one and never add it.
    start = engine.tokenizer.specials.get(bos) if _adds_bos(engine.tokenizer, settings) else None
    template = find_chat_template(folder)
    if config.chat_template:
        source = Path(config.chat_template)
        if not source.exists():
            raise UsageError(f"{source} does not exist", fix="give the path of a Jinja chat template")
        template = ChatTemplate(source.read_text("utf-8"), template.tokens if template else {}, name=str(source))
    return ServedModel(
        engine=engine,
        config=config,
        name=config.model_name or Path(folder).resolve().name,
        tokenizer=engine.tokenizer,
        encoder=PromptEncoder(engine.tokenizer, start),
        chat_template=template,
    )


def _adds_bos(tokenizer: Tokenizer, settings: dict[str, Any]) -> bool:
    if "add_bos_token" in settings:
        return bool(settings["add_bos_token"])
    if tokenizer.suffix != ".json":
        return False
    processor = json.loads(tokenizer.content).get("post_processor")
    return "SpecialToken" in json.dumps(processor) if processor else False
