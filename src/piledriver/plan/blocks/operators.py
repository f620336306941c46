"""`Operator` and `BlockCost`: what a part of a model computes, moves and keeps for one micro-batch on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OperatorClass = Literal["matmul", "attention", "memory"]
CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]


@dataclass(frozen=True, slots=True)
class Operator:
    """One kernel, or several alike: its class, floating-point operations and bytes moved."""

    name: str
    kind: OperatorClass
    flops: float = 0.0
    bytes: float = 0.0
    shape: tuple[int, int, int] | None = None
    """Rows, columns and depth of a matrix product."""
    groups: int = 1
    """Independent products of this shape (heads, experts)."""
    precision: str = ""
    """The dtype of the product where it is not that of the layout."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that the forward keeps for the backward."""

    name: str
    bytes: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective inside a block: its kind, the axis of the mesh, and the bytes of its larger side on this rank."""

    kind: CollectiveKind
    axis: str
    bytes: float
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """The cost of one block for one micro-batch on one rank."""

    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    recompute: tuple[Operator, ...] = ()
    """What the backward computes again."""
    kept: tuple[Kept, ...] = ()
    forward_workspace: float = 0.0
    """Largest bytes of temporaries in the forward."""
    backward_workspace: float = 0.0
    """Largest bytes of temporaries in the backward, recomputed activations included."""
    forward_exchanges: tuple[Exchange, ...] = ()
    backward_exchanges: tuple[Exchange, ...] = ()
    kernels: tuple[float, float] = (0.0, 0.0)
    """The host's work in the forward and in the backward, in launches of a kernel."""
    fp8_parameters: float = 0.0
    """Elements of weights that are cast to fp8, not to the compute dtype."""

    @property
    def kept_bytes(self) -> float:
        """Bytes kept for the backward."""
        return sum(one.bytes for one in self.kept)


def matmul(
    name: str, m: float, n: float, k: float, itemsize: float, *, groups: int = 1, precision: str = ""
) -> Operator:
    """Return a product [m, k] @ [k, n] with its operations and the bytes of its three matrices."""
    return Operator(
        name,
        "matmul",
        2.0 * m * n * k * groups,
        (m * k + k * n + m * n) * itemsize * groups,
        (max(1, round(m)), max(1, round(n)), max(1, round(k))),
        groups,
        precision,
    )


def moved(name: str, size: float) -> Operator:
    """Return an elementwise or reducing kernel that moves this many bytes."""
    return Operator(name, "memory", 0.0, size)


def gradients_of(operator: Operator, itemsize: float) -> list[Operator]:
    """Return the two products of a matmul's backward: by its input and by its weight."""
    assert operator.shape is not None
    m, n, k = operator.shape
    options = {"groups": operator.groups, "precision": operator.precision}
    return [
        matmul(f"{operator.name}, input gradient", m, k, n, itemsize, **options),  # type: ignore[arg-type]
        matmul(f"{operator.name}, weight gradient", n, k, m, itemsize, **options),  # type: ignore[arg-type]
    ]
