"""Measured rates of devices, kept with their date in the user's cache folder."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from piledriver.core.storage import atomic_write


def calibration_path(driver_name: str) -> Path:
    """Return the file of one device's rates."""
    slug = re.sub(r"[^a-z0-9]+", "-", driver_name.lower()).strip("-")
    return Path(os.path.expanduser("~/.cache/piledriver/plan")) / f"{slug}.json"


def load_calibration(driver_name: str) -> dict[str, Any]:
    """Return the measured rates of a device; empty if it was never calibrated."""
    path = calibration_path(driver_name)
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def save_calibration(driver_name: str, rates: dict[str, Any]) -> Path:
    """Write the measured rates of a device; return the file."""
    path = calibration_path(driver_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(json.dumps(rates, indent=2).encode())
    return path
