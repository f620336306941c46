"""Collectives of a run: counts and bytes of a block (`counted`), bandwidth without synchronising (`recorder`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piledriver.core.lazy import lazy_names

if TYPE_CHECKING:
    from piledriver.observe.communication.bandwidth import Traffic
    from piledriver.observe.communication.counted import Communication, counted_communication
    from piledriver.observe.communication.recorder import CommunicationRecorder

__all__ = ["Communication", "CommunicationRecorder", "Traffic", "counted_communication"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Communication": "counted",
        "CommunicationRecorder": "recorder",
        "Traffic": "bandwidth",
        "counted_communication": "counted",
    },
)
