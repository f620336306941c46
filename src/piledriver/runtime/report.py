"""Machine report of `piledriver env`: versions, cores, memory, devices, and what was detected with the reasons."""

from __future__ import annotations

import platform
from importlib import metadata

# Packages whose versions a bug report needs.
_PACKAGES = ("piledriver", "torch", "numpy", "safetensors", "zstandard", "lxml", "transformers", "tokenizers", "ray")


def describe_machine() -> dict[str, dict[str, str]]:
    """Return sections of facts, to print or to dump as JSON."""
    return {"versions": _versions(), "machine": _machine(), "accelerator": _accelerator(), "world": _world()}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _machine() -> dict[str, str]:
    import psutil

    from piledriver.runtime.hardware import usable_cores

    memory = psutil.virtual_memory()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": f"{usable_cores()} (those this process may run on)",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available",
    }


def _world() -> dict[str, str]:
    from piledriver.core.errors import PiledriverError
    from piledriver.runtime.world import detect_world

    try:
        reasons = detect_world().reasons
    except PiledriverError as error:
        # This command must also work in a wrong environment.
        return {"error": str(error)}
    return {what: f"{value} ({why})" for what, value, why in reasons}


def _accelerator() -> dict[str, str]:
    import torch

    from piledriver.runtime.hardware import why_cpu_only

    device = torch.accelerator.current_accelerator(check_available=True) if hasattr(torch, "accelerator") else None
    if device is None:
        return {"device": f"cpu ({why_cpu_only()})", "threads": str(torch.get_num_threads())}
    facts = {"device": device.type, "count": str(torch.accelerator.device_count())}
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory_gib = properties.total_memory / 2**30
            facts[f"cuda:{index}"] = (
                f"{properties.name}, {memory_gib:.0f} GiB, capability {properties.major}.{properties.minor}"
            )
    return facts
