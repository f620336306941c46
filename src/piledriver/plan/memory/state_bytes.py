"""`StateBytes`: bytes of weights, gradients and optimizer states of some parameters on one rank, by tier."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.engine.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes on the device and on the host, for some parameters of one rank."""

    weights: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    elements: float = 0.0
    """Parameters that this rank computes with, after tp and ep."""
    owned: float = 0.0
    """Parameters that this rank's optimizer steps on."""

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            states=self.states + other.states,
            host=self.host + other.host,
            disk=self.disk + other.disk,
            elements=self.elements + other.elements,
            owned=self.owned + other.owned,
        )

    def times(self, count: float) -> StateBytes:
        """Return the bytes of `count` such parts."""
        return StateBytes(
            weights=count * self.weights,
            gradients=count * self.gradients,
            states=count * self.states,
            host=count * self.host,
            disk=count * self.disk,
            elements=count * self.elements,
            owned=count * self.owned,
        )


def weight_size_of(layout: Layout) -> int:
    """Return the bytes of one weight as the model holds it."""
    return 2 if layout.has_bf16_weights else 4
