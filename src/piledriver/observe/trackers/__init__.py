"""Experiment trackers behind one small protocol, guarded so that none of them can stop training."""

from piledriver.observe.trackers.base import GeneralTracker, Tracker
from piledriver.observe.trackers.guard import Patience, Problems
from piledriver.observe.trackers.hub import TrackerHub
from piledriver.observe.trackers.registry import TRACKERS, available_trackers, choose_trackers, make_trackers

__all__ = [
    "TRACKERS",
    "GeneralTracker",
    "Patience",
    "Problems",
    "Tracker",
    "TrackerHub",
    "available_trackers",
    "choose_trackers",
    "make_trackers",
]
