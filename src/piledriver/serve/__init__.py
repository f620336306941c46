"""Floor 6: run a trained model.

- `Engine` serves requests with continuous batching over a paged KV cache; `generate` continues prompts offline
- `request`: what is asked and answered; `scheduling/`: block pool and scheduler, without torch; `execution/`: forward
  pass, sampling, CUDA graphs; `text/`: detokenisation and stop strings; `speculation/`: draft tokens
- `http/`: the OpenAI-compatible server; `front_end` starts its process, `ipc/` connects it with the engine
- `placement/` runs models larger than a device
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from piledriver.core.lazy import lazy_names

if TYPE_CHECKING:
    from piledriver.serve.config import EngineConfig
    from piledriver.serve.engine import Engine
    from piledriver.serve.errors import ServeError
    from piledriver.serve.offline import generate, open_engine
    from piledriver.serve.request import (
        Completion,
        Constraint,
        Delta,
        Request,
        RequestError,
        RequestOutput,
        SamplingParams,
        TokenLogprob,
    )
    from piledriver.serve.teacher_forcing import deterministic

__all__ = [
    "Completion",
    "Constraint",
    "Delta",
    "Engine",
    "EngineConfig",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ServeError",
    "TokenLogprob",
    "deterministic",
    "generate",
    "open_engine",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Completion": "request",
        "Constraint": "request",
        "Delta": "request",
        "Engine": "engine",
        "EngineConfig": "config",
        "ServeError": "errors",
        "Request": "request",
        "RequestError": "request",
        "RequestOutput": "request",
        "SamplingParams": "request",
        "TokenLogprob": "request",
        "deterministic": "teacher_forcing",
        "generate": "offline",
        "open_engine": "offline",
    },
)
