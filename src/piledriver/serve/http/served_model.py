"""`ServedModel`: the engine with everything that the routes need to know about its model."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from piledriver.core.errors import UsageError
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.engine.shards.local_params import part
from piledriver.serve.engine import Engine
from piledriver.serve.http.config import ServerConfig
from piledriver.serve.http.errors import ClientError
from piledriver.serve.http.events import EventBridge
from piledriver.serve.http.metrics import ServerMetrics
from piledriver.serve.structured.grammar import GrammarCompiler
from piledriver.serve.text.chat_template import ChatTemplate, find_chat_template, read_tokenizer_settings, token_text
from piledriver.serve.text.prompt_encoder import PromptEncoder


@dataclass(eq=False)
class ServedModel:
    """A model that is being served."""

    engine: Engine
    config: ServerConfig
    name: str
    tokenizer: Tokenizer
    encoder: PromptEncoder
    chat_template: ChatTemplate | None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.bridge = EventBridge(self.engine, self.config.max_queue)
        self.metrics = ServerMetrics(self.name, self.engine)
        self.grammars = GrammarCompiler(self.tokenizer, self.engine.model.config.vocab_size, self.engine.eos)

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of the model's config, a sample of every weight and the engine's settings."""
        digest = hashlib.sha256(repr(self.engine.model.config).encode() + repr(self.engine.config).encode())
        for name, parameter in self.engine.model.named_parameters():
            flat = part(parameter.detach()).reshape(-1)  # of a shard: its own, without a collective
            digest.update(name.encode() + str(flat[:: max(1, len(flat) // 64)][:64].float().tolist()).encode())
        return "pd_" + digest.hexdigest()[:12]

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


def open_served_model(engine: Engine, folder: str | Path, config: ServerConfig) -> ServedModel:
    """Return the served model of a folder whose engine was opened."""
    if engine.tokenizer is None:
        raise UsageError(f"{folder} has no tokenizer", fix="add its tokenizer.json to the folder")
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
