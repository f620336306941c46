"""Recurrent cells and the scan that runs them over time. Parameter names are those of flax's cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.functional.errors import InputShapeError
from piledriver.functional.frame import Initialiser
from piledriver.functional.initialisers import lecun_normal, orthogonal, zeros
from piledriver.functional.layers.dropout import replicated_like
from piledriver.functional.layers.linear import Dense, DenseParameters, promoted
from piledriver.functional.module import Module
from piledriver.functional.transforms.control import scan

_LECUN, _ORTHOGONAL = lecun_normal(), orthogonal()


class LSTMCell(Module):
    """One step of an LSTM (Hochreiter and Schmidhuber, 1997); the carry is (cell, hidden).

    Each gate has its own parameters (`ii`, `hi`, `if`, `hf`, ...); the eight products run as two.
    """

    features: int
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _LECUN
    recurrent_init: Initialiser = _ORTHOGONAL
    bias_init: Initialiser = zeros

    def __call__(self, carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        cell, hidden = carry
        input_gate = DenseParameters(self.features, self.param_dtype, self.kernel_init)
        hidden_gate = DenseParameters(self.features, self.param_dtype, self.recurrent_init, self.bias_init)
        inputs = [self.child(f"i{gate}", input_gate)(x.shape[-1]) for gate in "ifgo"]
        recurrent = [self.child(f"h{gate}", hidden_gate)(self.features) for gate in "ifgo"]
        x, hidden, w, u, b = promoted(
            self.dtype,
            x,
            hidden,
            torch.cat([kernel for kernel, _ in inputs], dim=1),
            torch.cat([kernel for kernel, _ in recurrent], dim=1),
            torch.cat([bias for _, bias in recurrent if bias is not None]),
        )
        recurrence = torch.addmm(b, hidden.reshape(-1, self.features), u).view(*hidden.shape[:-1], 4 * self.features)
        i, f, g, o = (x @ w + recurrence).chunk(4, dim=-1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
        return (cell, hidden), hidden

    def initial_carry(self, batch: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        zero = torch.zeros(*batch, self.features, dtype=self.dtype or like.dtype, device=like.device)
        return zero, zero


class GRUCell(Module):
    """One step of a gated recurrent unit (Cho et al., 2014); the carry is the hidden state."""

    features: int
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _LECUN
    recurrent_init: Initialiser = _ORTHOGONAL
    bias_init: Initialiser = zeros

    def __call__(self, carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        r = torch.sigmoid(self._from_input("ir", x) + self._from_hidden("hr", carry, False))
        z = torch.sigmoid(self._from_input("iz", x) + self._from_hidden("hz", carry, False))
        n = torch.tanh(self._from_input("in", x) + r * self._from_hidden("hn", carry, True))
        hidden = (1.0 - z) * n + z * carry
        return hidden, hidden

    def initial_carry(self, batch: tuple[int, ...], like: Tensor) -> Tensor:
        return torch.zeros(*batch, self.features, dtype=self.dtype or like.dtype, device=like.device)

    def _from_input(self, name: str, x: Tensor) -> Tensor:
        layer = Dense(self.features, True, self.dtype, self.param_dtype, self.kernel_init, self.bias_init)
        return self.child(name, layer)(x)

    def _from_hidden(self, name: str, hidden: Tensor, use_bias: bool) -> Tensor:
        layer = Dense(self.features, use_bias, self.dtype, self.param_dtype, self.recurrent_init, self.bias_init)
        return self.child(name, layer)(hidden)


class RNN(Module):
    """A cell scanned over (batch, length, features); with `reverse` from the end, outputs in the input's order.

    `lengths` says where each example ends. What lies behind has no effect: the carry stays as it is there (with
    `reverse` the scan starts at the example's own end), and the outputs are zeros.
    """

    cell: LSTMCell | GRUCell
    reverse: bool = False
    return_carry: bool = False

    def __call__(self, x: Tensor, carry: Any = None, lengths: Tensor | None = None) -> Any:
        """Return the outputs of every step, or `(last carry, outputs)` with `return_carry`."""
        if x.ndim < 2 or x.shape[-2] == 0:
            raise InputShapeError(self.path, f"a sequence of shape {tuple(x.shape)}", "pass (batch, length, features)")
        if lengths is not None and lengths.shape != x.shape[:-2]:
            raise InputShapeError(
                self.path,
                f"lengths of shape {tuple(lengths.shape)} for a batch of shape {tuple(x.shape[:-2])}",
                "pass one length for every example",
            )
        cell = self.child("cell", self.cell)
        if carry is None:
            start = cell.initial_carry(tuple(x.shape[:-2]), x)
            carry = pytree.tree_map(lambda zero: replicated_like(zero, x), start)
        columns = x.movedim(-2, 0)
        if lengths is None:
            carry, outputs = scan(cell, carry, columns, reverse=self.reverse)
        else:
            steps = torch.arange(x.shape[-2], device=x.device).reshape(-1, *[1] * (lengths.ndim + 1))
            carry, outputs = scan(_within(cell), carry, (columns, steps < lengths[..., None]), reverse=self.reverse)
        outputs = outputs.movedim(0, -2)
        return (carry, outputs) if self.return_carry else outputs


class Bidirectional(Module):
    """Two cells, one from each end; their outputs side by side."""

    forward: LSTMCell | GRUCell
    backward: LSTMCell | GRUCell

    def __call__(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        ahead = self.child("forward", RNN(self.forward))(x, lengths=lengths)
        return torch.cat([ahead, self.child("backward", RNN(self.backward, reverse=True))(x, lengths=lengths)], dim=-1)


def _within(cell: Callable[[Any, Any], tuple[Any, Tensor]]) -> Callable[[Any, tuple[Tensor, Tensor]], Any]:
    """Return the cell as a step that changes only the examples which have not ended."""

    def step(carry: Any, inputs: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
        x, is_inside = inputs
        new, output = cell(carry, x)
        kept = pytree.tree_map(lambda after, before: torch.where(is_inside, after, before), new, carry)
        return kept, torch.where(is_inside, output, 0.0)

    return step
