"""The results of a demo."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.corpus.pipeline.manifest import Manifest
from piledriver.demo.domains import Domain
from piledriver.demo.samples import Sample
from piledriver.evaluate import Figures
from piledriver.train import RunSummary


@dataclass(frozen=True)
class DemoResult:
    """The results that the terminal and the report show."""

    out: str
    domains: list[Domain]
    manifest: Manifest
    summary: RunSummary
    before: dict[str, Figures]
    after: dict[str, Figures]
    baselines: dict[str, dict[str, float]]
    """Baseline -> domain -> bits per byte."""
    samples: list[Sample]
    """One per domain."""
    seconds: dict[str, float]
    """Seconds of each part; their sum is the whole demo."""
