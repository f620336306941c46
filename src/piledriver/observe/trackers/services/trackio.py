"""trackio runs."""

from __future__ import annotations

from piledriver.observe.trackers.services.project_run import ProjectRunTracker


class TrackioTracker(ProjectRunTracker):
    """Further arguments go to `trackio.init`."""

    name = "trackio"
