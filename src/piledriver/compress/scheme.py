"""Schemes of quantisation, by name: `w4a16-g128`, `w8a16`, `w8a8`, `w8a8-fp8`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from piledriver.core.errors import UsageError
from piledriver.kernels.linear import GROUP, GROUPS, WeightKind

NAMES = (
    *(f"w4a16-g{group}{suffix}" for group in GROUPS for suffix in ("", "-asym")),
    *("w8a16", "w8a8", "w8a16-fp8", "w8a8-fp8"),
)
"""Names of all schemes: bits of weights and activations, int4's group, `-asym` for a zero point, `-fp8` for fp8."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How weights (and activations) are stored.

    >>> Scheme.named("w4a16-g64-asym")
    Scheme(weights='int4', group=64, symmetric=False, dynamic=False)
    >>> Scheme.named("w8a8").name
    'w8a8'
    """

    weights: WeightKind
    """int4 with a scale for each group, int8 or fp8 with one for each row."""
    group: int = GROUP
    """Columns that share a scale (int4)."""
    symmetric: bool = True
    """Ranges centred on 0; otherwise each group has a zero point (int4)."""
    dynamic: bool = False
    """Round inputs too, to the same 8-bit type, with a scale for each token."""

    @classmethod
    def named(cls, name: str) -> Scheme:
        """Return the scheme of a name."""
        if name not in NAMES:
            raise UsageError(f"no scheme {name!r}", fix=f"choose from {', '.join(NAMES)}")
        group = re.search(r"g(\d+)", name)
        if group is not None:
            return cls(weights="int4", group=int(group[1]), symmetric=not name.endswith("-asym"))
        return cls(weights="fp8" if name.endswith("-fp8") else "int8", dynamic=name.startswith("w8a8"))

    @property
    def name(self) -> str:
        """The name that gives this scheme."""
        if self.weights == "int4":
            return f"w4a16-g{self.group}" + ("" if self.symmetric else "-asym")
        return ("w8a8" if self.dynamic else "w8a16") + ("-fp8" if self.weights == "fp8" else "")

    def bits_per_weight(self, scale_bits: int = 16) -> float:
        """Return the bits that a weight takes, with its share of a group's scale and zero point."""
        if self.weights != "int4":
            return 8.0
        return 4.0 + (scale_bits + (0 if self.symmetric else 4)) / self.group
