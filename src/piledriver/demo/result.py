"""What the demo found: what the terminal and the page show."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.corpus.pipeline.manifest import Manifest
from piledriver.demo.domains import Domain
from piledriver.demo.samples import Sample
from piledriver.evaluate import Figures
from piledriver.train import RunSummary


@dataclass(frozen=True)
class DemoResult:
    """Every figure of one run."""

    out: str
    domains: list[Domain]
    manifest: Manifest
    summary: RunSummary
    before: dict[str, Figures]
    after: dict[str, Figures]
    baselines: dict[str, dict[str, float]]
    """Name of the baseline to domain to bits per byte."""
    samples: list[Sample]
    """One of each domain."""
    seconds: dict[str, float]
    """What each part took; all of them together are the whole demo."""
