"""`piledriver bench serve`: measure a running server."""

from __future__ import annotations

from piledriver.cli.options.parser import Verbs

VERBS: Verbs = {"serve": ("piledriver.cli.bench.serve", "measure latency and throughput of a server")}
