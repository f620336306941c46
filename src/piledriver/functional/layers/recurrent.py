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
from piledriver.functional.layers.conv import Conv, Padding, Sizes
from piledriver.functional.layers.dropout import replicated_like
from piledriver.functional.layers.linear import Dense, DenseParameters, promoted
from piledriver.functional.module import Module
from piledriver.functional.transforms.control import scan

_LECUN, _ORTHOGONAL = lecun_normal(), orthogonal()


class _Cell(Module):
    """The fields of cells on (batch, features), and layers from their input and their hidden state."""

    features: int
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _LECUN
    recurrent_init: Initialiser = _ORTHOGONAL
    bias_init: Initialiser = zeros

    def initial_carry(self, batch: tuple[int, ...], like: Tensor) -> Any:
        """Return zeros for these batch dimensions; `like` is one step of the input."""
        return _zeros((*batch, self.features), self.dtype, like)

    def _from_input(self, name: str, x: Tensor) -> Tensor:
        layer = Dense(self.features, True, self.dtype, self.param_dtype, self.kernel_init, self.bias_init)
        return self.child(name, layer)(x)

    def _from_hidden(self, name: str, hidden: Tensor, use_bias: bool = False) -> Tensor:
        layer = Dense(self.features, use_bias, self.dtype, self.param_dtype, self.recurrent_init, self.bias_init)
        return self.child(name, layer)(hidden)


class LSTMCell(_Cell):
    """One step of an LSTM (Hochreiter and Schmidhuber, 1997); the carry is (cell, hidden).

    Each gate has its own parameters (`ii`, `hi`, `if`, `hf`, ...); the eight products run as two.
    """

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
        zero = super().initial_carry(batch, like)
        return zero, zero


class GRUCell(_Cell):
    """One step of a gated recurrent unit (Cho et al., 2014); the carry is the hidden state."""

    def __call__(self, carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        r = torch.sigmoid(self._from_input("ir", x) + self._from_hidden("hr", carry))
        z = torch.sigmoid(self._from_input("iz", x) + self._from_hidden("hz", carry))
        n = torch.tanh(self._from_input("in", x) + r * self._from_hidden("hn", carry, True))
        hidden = (1.0 - z) * n + z * carry
        return hidden, hidden


class SimpleCell(_Cell):
    """One step of a plain recurrent network (Elman, 1990); the carry is the hidden state.

    `residual` adds the carry before the activation.
    """

    activation: Callable[[Tensor], Tensor] = torch.tanh
    residual: bool = False

    def __call__(self, carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self._from_input("i", x) + self._from_hidden("h", carry)
        hidden = self.activation(hidden + carry if self.residual else hidden)
        return hidden, hidden


class ConvLSTMCell(Module):
    """One step of a convolutional LSTM (Shi et al., 2015); inputs are (batch, *positions, channels)."""

    features: int
    window: Sizes
    strides: Sizes = 1
    padding: Padding = "SAME"
    use_bias: bool = True
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32

    @property
    def feature_rank(self) -> int:
        """How many trailing dimensions one step of the input has."""
        return 2 if isinstance(self.window, int) else len(self.window) + 1

    def __call__(self, carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        cell, hidden = carry
        settings = (self.strides, self.padding, 1, 1, self.use_bias, self.dtype, self.param_dtype)
        convolution = Conv(4 * self.features, self.window, *settings)
        gates = self.child("ih", convolution)(x) + self.child("hh", convolution)(hidden)
        i, g, f, o = gates.chunk(4, dim=-1)
        cell = torch.sigmoid(f + 1.0) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
        return (cell, hidden), hidden

    def initial_carry(self, batch: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        zero = _zeros((*like.shape[:-1], self.features), self.dtype, like)
        return zero, zero


class RNN(Module):
    """A cell scanned over (batch, length, features); with `reverse` from the end, outputs in the input's order.

    A cell is any module `(carry, x) -> (carry, output)` with a method `initial_carry(batch, like)`, where `like` is one
    step of the input; carry and output may be trees. A cell whose steps have more than one trailing dimension says how
    many in `feature_rank`. Every step draws its own random numbers, as every application of a shared module does.

    `lengths` are the lengths of the examples. Later steps have no effect: they keep the carry (with `reverse` the scan
    starts at the example's own end), and their outputs are zeros.
    """

    cell: Module
    reverse: bool = False
    return_carry: bool = False

    def __call__(
        self,
        x: Tensor,
        carry: Any = None,
        lengths: Tensor | None = None,
        *,
        initial_carry: Any = None,
        seq_lengths: Tensor | None = None,
    ) -> Any:
        """Return the outputs of every step, or `(last carry, outputs)` with `return_carry`.

        `initial_carry` and `seq_lengths` are flax's names for `carry` and `lengths`.
        """
        carry = initial_carry if carry is None else carry
        lengths = seq_lengths if lengths is None else lengths
        time = x.ndim - 1 - getattr(self.cell, "feature_rank", 1)
        if time < 0 or x.shape[time] == 0:
            raise InputShapeError(self.path, f"a sequence of shape {tuple(x.shape)}", "pass (batch, length, features)")
        batch = tuple(x.shape[:time])
        if lengths is not None and tuple(lengths.shape) != batch:
            raise InputShapeError(
                self.path,
                f"lengths of shape {tuple(lengths.shape)} for a batch of shape {batch}",
                "pass one length for every example",
            )
        cell: Any = self.child("cell", self.cell)
        columns = x.movedim(time, 0)
        if carry is None:
            if not hasattr(cell, "initial_carry"):
                raise InputShapeError(
                    self.path, f"{type(cell).__name__} has no initial_carry(batch, like)", "define it, or pass carry="
                )
            start = cell.initial_carry(batch, columns[0])
            carry = pytree.tree_map(lambda zero: replicated_like(zero, x), start)
        if lengths is None:
            carry, outputs = scan(cell, carry, columns, reverse=self.reverse)
        else:
            steps = torch.arange(x.shape[time], device=x.device).reshape(-1, *[1] * lengths.ndim)
            carry, outputs = scan(_within(cell), carry, (columns, steps < lengths), reverse=self.reverse)
        outputs = pytree.tree_map(lambda one: one.movedim(0, time), outputs)
        return (carry, outputs) if self.return_carry else outputs


class Bidirectional(Module):
    """Two cells, one from each end; their outputs side by side."""

    forward: Module
    backward: Module

    def __call__(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        ahead = self.child("forward", RNN(self.forward))(x, lengths=lengths)
        return torch.cat([ahead, self.child("backward", RNN(self.backward, reverse=True))(x, lengths=lengths)], dim=-1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype | None, like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=dtype or like.dtype, device=like.device)


def _within(cell: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any, tuple[Tensor, Tensor]], Any]:
    """Return the cell as a step that changes only the examples which have not ended."""

    def step(carry: Any, inputs: tuple[Tensor, Tensor]) -> tuple[Any, Any]:
        x, is_inside = inputs
        new, output = cell(carry, x)

        def chosen(after: Tensor, before: Tensor) -> Tensor:
            return torch.where(is_inside.reshape(*is_inside.shape, *[1] * (after.ndim - is_inside.ndim)), after, before)

        shown = pytree.tree_map(lambda one: chosen(one, torch.zeros_like(one)), output)
        return pytree.tree_map(chosen, new, carry), shown

    return step
