"""torch's private API that this room uses, so that a torch upgrade is one file."""

from __future__ import annotations

from typing import Any


def supports_found_inf(optimizer: Any) -> bool:
    """Return whether a torch optimizer honours `found_inf` in its step; torch has no public flag for it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
