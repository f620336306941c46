"""`Offload`: which tier (device, host memory, disk) holds optimizer states, parameters and gradients in training."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from piledriver.engine.errors import LayoutError

TierName = Literal["device", "host", "disk"]
GradientTier = Literal["host", "disk", "step"]
OffloadPreset = Literal["none", "optimizer", "parameters"]


@dataclass(frozen=True, kw_only=True)
class Offload:
    """The tier of each part of a training state.

    >>> Offload(optimizer="disk", optimizer_share=0.4, folder="/nvme")
    Offload(optimizer='disk', optimizer_share=0.4, folder='/nvme')
    >>> Offload(optimizer="disk")
    Traceback (most recent call last):
    piledriver.engine.errors.LayoutError: offload: a tier is on disk, and no folder is given. Fix: add folder='/path/on/a/local/disk'
    """  # noqa: E501

    optimizer: TierName = "host"
    """Where fp32 master weights and optimizer states live."""
    optimizer_share: float = 1.0
    """The fraction of them that lives there; the rest lives one tier nearer: on the host, or on the device."""
    parameters: TierName = "device"
    """Where the weights live that the device computes with; from the host or disk, blocks are streamed."""
    parameters_share: float = 1.0
    """The fraction of the streamed weights that lives there; the rest lives one tier nearer."""
    gradients: GradientTier = "host"
    """Where gradients wait for the step: in host memory (fp32), in a file, or nowhere: with `step` each block is
    stepped in the backward, as soon as its gradients have arrived."""
    folder: str | None = None
    """The folder for what is on disk; its files have no names and vanish with the process."""
    buffers: int = 4
    """Host buffers of the optimizer step: blocks that are read, computed or written at a time; 1 overlaps nothing."""
    buffer_bytes: int = 256 * 2**20
    """Bytes of one buffer."""
    pin: bool = True
    """Pin host memory, which transfers to a GPU need to run at full speed."""

    def __post_init__(self) -> None:
        for name, choices in (("optimizer", TierName), ("parameters", TierName), ("gradients", GradientTier)):
            if getattr(self, name) not in get_args(choices):
                named = ", ".join(map(repr, get_args(choices)))
                raise LayoutError(f"offload: {name} is {getattr(self, name)!r}", fix=f"use one of {named}")
        for name in ("optimizer_share", "parameters_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise LayoutError(
                    f"offload: {name} is {getattr(self, name)}", fix="give a fraction above 0 and at most 1"
                )
        if self.buffers < 1 or self.buffer_bytes < 2**16:
            raise LayoutError(
                f"offload: {self.buffers} buffers of {self.buffer_bytes} bytes", fix="use 1 or more of 65536 or more"
            )
        if self.uses_disk and not self.folder:
            raise LayoutError(
                "offload: a tier is on disk, and no folder is given", fix="add folder='/path/on/a/local/disk'"
            )
        if self.optimizer == "device" and (self.parameters != "device" or self.gradients != "host"):
            raise LayoutError(
                f"offload: the optimizer is on the device, parameters on {self.parameters}, gradients "
                f"{self.gradients!r}",
                fix="use optimizer='host' or 'disk'",
            )

    @property
    def uses_disk(self) -> bool:
        """Whether anything is kept in files."""
        return "disk" in (self.optimizer, self.parameters, self.gradients)

    @property
    def steps_by_block(self) -> bool:
        """Whether the optimizer steps block by block, through buffers or in the backward."""
        return self.optimizer == "disk" or self.gradients != "host"

    def __repr__(self) -> str:
        """Show only what differs from the defaults."""
        said = [f"{one.name}={getattr(self, one.name)!r}" for one in fields(self)]
        kept = [text for text, one in zip(said, fields(self), strict=True) if getattr(self, one.name) != one.default]
        return f"Offload({', '.join(kept)})"


PRESETS: dict[str, Offload] = {
    "none": Offload(optimizer="device"),
    "optimizer": Offload(),
    "parameters": Offload(parameters="host"),
}
"""What the names that `Layout(offload=...)` takes stand for."""
