"""Floor 6: run a trained model. `generate` continues prompts; `placement` runs models larger than a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piledriver.serve.decode import Sampling, generate

__all__ = ["Sampling", "generate"]


def __getattr__(name: str) -> Any:
    # Imported on first use: placement needs neither models nor attention kernels.
    if name in __all__:
        from piledriver.serve import decode

        return getattr(decode, name)
    raise AttributeError(f"module 'piledriver.serve' has no attribute {name!r}")
