"""A model as a pure function: `init` returns a tree of parameters, `apply` changes nothing, a step returns a new state.

python examples/functional_model.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from piledriver.functional import Dense, Module, TrainState, adamw, jit, key, value_and_grad


class MLP(Module):
    """Two dense layers; a `Module` is a frozen dataclass, and parameters are declared where they are used."""

    hidden: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return one prediction for each row."""
        x = self.child("up", Dense(self.hidden))(x)
        return self.child("down", Dense(1))(torch.relu(x))


def step(state: TrainState, x: Tensor, y: Tensor) -> tuple[TrainState, Tensor]:
    """Return the next state and the loss of the present one."""
    loss, grads = value_and_grad(lambda params: (state.apply(params, x) - y).square().mean())(state.params)
    return state.apply_gradients(grads), loss


def main() -> None:
    """Fit a small regression."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compile", action="store_true", help="forward, backward and update as one graph")
    options = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = x.sum(dim=1, keepdim=True).sin()
    model = MLP(hidden=64)
    state = TrainState.create(model.apply, model.init(key(0), x), adamw(1e-2))
    take_step = jit(step) if options.compile else step
    for number in range(options.steps):
        state, loss = take_step(state, x, y)
        if number % 50 == 0 or number == options.steps - 1:
            print(f"step {number}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
