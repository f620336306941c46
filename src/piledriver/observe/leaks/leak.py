"""What a leak report says."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.observe.leaks.lines import SourceLine
from piledriver.observe.memory import readable

_WHAT = {
    "tensors": "tensors are kept",
    "graph": "an autograd graph is kept",
    "hook": "tensors are kept by a hook or a reference cycle",
    "host memory": "host memory is kept",
    "files": "files stay open",
    "threads": "threads do not end",
}
_FIX = {
    "tensors": "drop what is no longer needed, or keep .item() or .detach().cpu()",
    "graph": "keep .detach() or .item() of the value instead",
    "hook": "remove the hook (handle.remove()), or let its function not refer to the tensor",
    "host memory": "drop what is no longer needed, or bound it (deque(maxlen=...))",
    "files": "close them (with open(...) as file)",
    "threads": "join them, or use one executor",
}


@dataclass(frozen=True)
class Leak:
    """One thing that grows with every step."""

    kind: str
    """tensors, graph, hook, host memory, files or threads."""
    line: SourceLine
    """Where it is made."""
    per_step: float
    """Bytes per step; for files and threads, their number per step."""
    step: int
    """The step at which it was found, counted from the first call."""
    held_by: str = ""
    """What holds it, where that is known."""

    def __str__(self) -> str:
        amount = f"{self.per_step:.1f}" if self.kind in ("files", "threads") else readable(self.per_step)
        held = f", held by {self.held_by}" if self.held_by else ""
        return f"leak: {_WHAT[self.kind]}, {amount} a step, made at {self.line}{held}. Fix: {_FIX[self.kind]}"
