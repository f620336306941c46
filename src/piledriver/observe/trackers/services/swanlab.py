"""SwanLab runs."""

from __future__ import annotations

from piledriver.observe.trackers.services.project_run import ProjectRunTracker


class SwanLabTracker(ProjectRunTracker):
    """Further arguments go to `swanlab.init`."""

    name = "swanlab"
