"""Errors between processes: one class per cause."""

from __future__ import annotations

from piledriver.core.errors import PiledriverError, UsageError


class WorldError(UsageError):
    """The environment describes an invalid world: a rank beyond the world size, a size that is not a number."""


class MissingDeviceError(UsageError):
    """The requested device is not present."""


class RendezvousError(PiledriverError):
    """The processes could not connect: rank 0 does not listen, a rank is missing, or world sizes differ."""


class PortTakenError(RendezvousError):
    """Another program listens on the port of the rendezvous."""


class LateRankError(PiledriverError):
    """Some ranks did not reach a barrier in time; the message names them."""


class LostPeerError(PiledriverError):
    """A collective failed because another process died or became unreachable."""


class DisagreementError(PiledriverError):
    """Ranks called different collectives, or the same one with incompatible tensors."""


class StoppedError(PiledriverError):
    """The launcher received a signal to stop (for example from a scheduler) and forwarded it to its processes."""

    exit_code = 143


class LaunchError(PiledriverError):
    """A launched process failed; the message names its rank and error."""
