"""`mii.pipeline`: an engine in this process."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from piledriver.compat.mii.response import Response
from piledriver.compat.mii.settings import MODEL_KEYS, generation_settings, model_settings
from piledriver.core.errors import UsageError
from piledriver.serve.engine import Engine
from piledriver.serve.request import SamplingParams


def pipeline(
    model_name_or_path: str = "",
    model_config: Mapping[str, Any] | None = None,
    all_rank_output: bool = False,
    **kwargs: Any,
) -> MIIPipeline:
    """Return a callable that continues prompts with the model of a folder."""
    from piledriver.data.tokenizer.open import open_tokenizer
    from piledriver.serve.offline import open_engine

    settings = model_settings(model_name_or_path, model_config, kwargs, MODEL_KEYS)
    own = settings.get("tokenizer")
    engine = open_engine(
        settings["model_name_or_path"],
        tokenizer=open_tokenizer(own) if isinstance(own, str) else own,
        max_context=settings.get("max_length") or 0,
    )
    return MIIPipeline(engine)


class MIIPipeline:
    """Continues prompts until `destroy`."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine

    def __call__(self, prompts: str | Sequence[str], **generation: Any) -> list[Response]:
        """Return a `Response` for each prompt; parameters are those of MII."""
        engine = self._engine
        if engine is None:
            raise UsageError("the pipeline was destroyed", fix="make a new one with mii.pipeline")
        full = generation.get("return_full_text", False)
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        encoded = [engine.encode(prompt) for prompt in asked]
        params = []
        for ids in encoded:
            fields = generation_settings(generation, len(ids))
            if fields["seed"] is None:
                fields["seed"] = secrets.randbits(62)
            params.append(SamplingParams(**fields))
        found = []
        for prompt, ids, output in zip(asked, encoded, engine.generate(encoded, params), strict=True):
            answer = output.completions[0]
            text = prompt + answer.text if full else answer.text
            found.append(Response(text, len(ids), len(answer.token_ids), str(answer.finish_reason)))
        return found

    def destroy(self) -> None:
        """Free the model and its cache."""
        self._engine = None
