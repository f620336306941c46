"""Floor 3: trackers, timers, memory, FLOPs, communication, system monitor, profile and its report. See docs/observe.md.

Import from the file that answers your question; the names here are loaded on use, so that a tracker costs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from piledriver.core.lazy import lazy_names

if TYPE_CHECKING:
    from piledriver.observe.profile.annotations import region
    from piledriver.observe.report.report import Report
    from piledriver.observe.report.run import profile_step

__all__ = ["Report", "profile_step", "region"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Report": "report.report",
        "profile_step": "report.run",
        "region": "profile.annotations",
    },
)
