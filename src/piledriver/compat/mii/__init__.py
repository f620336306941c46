"""The names of DeepSpeed-MII over `piledriver.serve`: `pipeline`, `serve`, `client`.

Settings that have a meaning here are mapped; settings about processes and ports inside MII have no effect and are named
in one log line; settings that would change answers and are not supported are rejected.
"""

from __future__ import annotations

from piledriver.compat.mii.client import MIIClient, client, serve
from piledriver.compat.mii.pipeline import MIIPipeline, pipeline
from piledriver.compat.mii.response import Response

__all__ = ["MIIClient", "MIIPipeline", "Response", "client", "pipeline", "serve"]
