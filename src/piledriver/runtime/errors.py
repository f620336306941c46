"""What can go wrong between processes: one class per cause, each naming the rank, the value and the fix."""

from __future__ import annotations

from piledriver.core.errors import PiledriverError, UsageError


class WorldError(UsageError):
    """The environment describes a world that cannot be: a rank beyond the size, a size that is not a number."""


class MissingDeviceError(UsageError):
    """A device was asked for that this process cannot have."""


class RendezvousError(PiledriverError):
    """The processes did not find each other: nobody listens, somebody never came, or they disagree on how many."""


class PortTakenError(RendezvousError):
    """Another program listens on the port that the main process wants to listen on."""


class LateRankError(PiledriverError):
    """A barrier was not reached by every rank in time; the message names those that did not come."""


class LostPeerError(PiledriverError):
    """A collective failed because another process died or cannot be reached any more."""


class DisagreementError(PiledriverError):
    """The ranks called different collectives, or the same one with tensors that do not fit together."""


class StoppedError(PiledriverError):
    """The launcher was asked to stop, by a scheduler, say, and has asked its processes."""

    exit_code = 143


class LaunchError(PiledriverError):
    """A launched process failed; the message names its rank and what it said."""
