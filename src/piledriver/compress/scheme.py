"""Schemes of quantisation, by name: `w4a16-g128`, `w8a16`, `w8a8`, `w8a8-fp8`, `w8a8-fp8-g128`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from piledriver.core.errors import UsageError
from piledriver.kernels.linear import GROUPS, WeightKind

NAMES = (
    *(f"w4a16-g{group}{suffix}" for group in GROUPS for suffix in ("", "-asym")),
    *("w8a16", "w8a8", "w8a16-fp8", "w8a8-fp8", "w8a16-fp8-g128", "w8a8-fp8-g128"),
)
"""Names of all schemes: bits of weights and activations, `-fp8`, columns of a group, `-asym` for a zero point."""

KEPT_DENSE = {
    "attention.kv_b": "decoding over latent vectors reads it as a matrix",
    "mlp.router.score": "small, and its choices must not change",
    "shared_gate": "small",
}
"""Layers of a block that stay dense in every scheme, and why."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How weights (and activations) are stored.

    >>> Scheme.named("w4a16-g64-asym")
    Scheme(weights='int4', group=64, symmetric=False, dynamic=False)
    >>> Scheme.named("w8a8-fp8-g128").name
    'w8a8-fp8-g128'
    """

    weights: WeightKind
    """int4 with a scale for each group, int8 with one for each row, fp8 with either."""
    group: int | None = None
    """Columns that share a scale; None for whole rows."""
    symmetric: bool = True
    """Ranges centred on 0; otherwise each group has a zero point (int4)."""
    dynamic: bool = False
    """Round inputs too, to the same 8-bit type, with a scale for each token, or each group of its columns."""

    @classmethod
    def named(cls, name: str) -> Scheme:
        """Return the scheme of a name."""
        if name not in NAMES:
            raise UsageError(f"no scheme {name!r}", fix=f"choose from {', '.join(NAMES)}")
        found = re.search(r"g(\d+)", name)
        group = None if found is None else int(found[1])
        if name.startswith("w4"):
            return cls(weights="int4", group=group, symmetric=not name.endswith("-asym"))
        return cls(weights="fp8" if "fp8" in name else "int8", group=group, dynamic=name.startswith("w8a8"))

    @property
    def name(self) -> str:
        """The name that gives this scheme."""
        group = "" if self.group is None else f"-g{self.group}"
        if self.weights == "int4":
            return f"w4a16{group}" + ("" if self.symmetric else "-asym")
        return ("w8a8" if self.dynamic else "w8a16") + ("-fp8" if self.weights == "fp8" else "") + group

    def fits(self, columns: int) -> bool:
        """Return whether groups divide a number of columns."""
        return self.group is None or columns % self.group == 0

    def bits_per_weight(self, scale_bits: int = 16) -> float:
        """Return the bits that a weight takes, with its share of a group's scale and zero point."""
        bits = 4.0 if self.weights == "int4" else 8.0
        return bits if self.group is None else bits + (scale_bits + (0 if self.symmetric else 4)) / self.group
