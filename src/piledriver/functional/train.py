"""A train state and what goes with it: loss scaling, averaged weights, early stopping, micro-batches.

All are immutable trees: a step is a pure function from one state to the next, so that it jits, shards and replays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.functional.errors import TransformError
from piledriver.functional.optimizers.optimizers import Optimizer, aligned, apply_updates
from piledriver.functional.struct import replace, static, tree_dataclass
from piledriver.functional.transforms.transforms import as_function, value_and_grad
from piledriver.functional.tree import Tree, freeze, leaves_of, rebuild

S = TypeVar("S", bound="TrainState")


@tree_dataclass
class TrainState:
    """Parameters, the optimizer's state, the step, and other collections (`batch_stats`, ...).

    >>> from piledriver.functional import Dense, key, sgd
    >>> model, x = Dense(1), torch.ones(4, 2)
    >>> state = TrainState.create(model.apply, model.init(key(0), x), sgd(0.1))
    >>> loss, grads = value_and_grad(lambda params: state.apply(params, x).square().mean())(state.params)
    >>> int(state.apply_gradients(grads).step)
    1
    """

    step: Tensor
    params: Any
    opt_state: Any
    collections: Tree
    apply_fn: Callable[..., Any] = static()
    optimizer: Optimizer = static()

    @classmethod
    def create(
        cls: type[S],
        apply_fn: Callable[..., Any],
        variables: Mapping[str, Any] | None = None,
        optimizer: Optimizer | None = None,
        *,
        params: Any = None,
        tx: Optimizer | None = None,
        **fields: Any,
    ) -> S:
        """Return a state at step 0 from what `init` returned; flax's `params=` and `tx=` are taken too."""
        variables, optimizer = {"params": params} if variables is None else variables, optimizer or tx
        if variables.get("params") is None:
            raise TransformError("the variables have no collection 'params'", fix="pass what `init` returned")
        if optimizer is None:
            raise TransformError("a train state without an optimizer", fix="pass one, such as `adamw(1e-3)`")
        params = freeze(variables["params"])
        others = Tree({name: tree for name, tree in variables.items() if name != "params"})
        leaves = leaves_of(params)
        step = torch.zeros((), dtype=torch.int32, device=leaves[0].device if leaves else None)
        return cls(
            step=step,
            params=params,
            opt_state=optimizer.init(params),
            collections=others,
            apply_fn=apply_fn,
            optimizer=optimizer,
            **fields,
        )

    @property
    def tx(self) -> Optimizer:
        """The optimizer, by flax's name."""
        return self.optimizer

    def apply(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `apply_fn` with these parameters and this state's other collections."""
        return self.apply_fn({"params": params, **self.collections}, *args, **kwargs)

    def apply_gradients(self: S, grads: Any, **changes: Any) -> S:
        """Return the state after one optimizer step; `changes` replace other fields, such as `collections=`."""
        updates, opt_state = self.optimizer.update(grads, self.opt_state, self.params)
        params = apply_updates(self.params, updates)
        return replace(self, step=self.step + 1, params=params, opt_state=opt_state, **changes)


@tree_dataclass
class DynamicScale:
    """Loss scaling for fp16, as in flax: the scale halves after a step that is not finite.

    It doubles in a finite step that follows `interval` finite ones.
    """

    scale: Tensor
    finite_steps: Tensor
    growth: float = static(default=2.0)
    backoff: float = static(default=0.5)
    interval: int = static(default=2000)

    @classmethod
    def create(cls, scale: float = 65536.0, **settings: Any) -> DynamicScale:
        return cls(scale=torch.tensor(scale), finite_steps=torch.tensor(0, dtype=torch.int32), **settings)

    def value_and_grad(self, function: Any, argnums: int = 0, has_aux: bool = False) -> Callable[..., Any]:
        """Return `(new scale, is finite, value, grads)`; skip the step if the gradients are not finite.

        `select(is_finite, new_state, old_state)` skips without leaving the graph.
        """
        plain = as_function(function)

        def scaled(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            output = plain(*args, **kwargs)
            value = output[0] if has_aux else output
            return value * self.scale.to(device=value.device, dtype=value.dtype), output

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            (_, output), grads = value_and_grad(scaled, argnums, has_aux=True)(*args, **kwargs)
            leaves = [leaf.float() / self.scale.to(leaf.device) for leaf in leaves_of(grads)]
            is_finite = torch.stack([torch.isfinite(leaf).all() for leaf in leaves]).all()
            return self._moved(is_finite), is_finite, output, rebuild(grads, leaves)

        return wrapped

    def _moved(self, is_finite: Tensor) -> DynamicScale:
        is_finite = is_finite.to(self.scale.device)
        grows = self.finite_steps >= self.interval
        up = torch.where(grows, torch.clamp(self.scale * self.growth, max=torch.finfo(torch.float32).max), self.scale)
        down = torch.clamp(self.scale * self.backoff, min=1.0)
        steps = torch.where(is_finite & ~grows, self.finite_steps + 1, torch.zeros_like(self.finite_steps))
        return replace(self, scale=torch.where(is_finite, up, down), finite_steps=steps)


@tree_dataclass
class EMA:
    """An exponential moving average of a tree; `debiased` corrects for its start.

    Of 16-bit tensors it is kept in fp32: in their own precision it would stop where a step is below half a last bit.
    """

    average: Any
    count: Tensor
    decay: float = static(default=0.999)

    @classmethod
    def create(cls, tree: Any, decay: float = 0.999) -> EMA:
        """Return an average of nothing yet."""
        zeros = rebuild(tree, [torch.zeros_like(leaf, dtype=_wide(leaf)) for leaf in leaves_of(tree)])
        return cls(average=zeros, count=torch.tensor(0, dtype=torch.int32), decay=decay)

    def update(self, tree: Any) -> EMA:
        """Return the average with one more value."""
        averages = leaves_of(self.average)
        fresh = [leaf.to(own.dtype) for own, leaf in zip(averages, leaves_of(aligned(tree, self.average)), strict=True)]
        new = torch._foreach_add(torch._foreach_mul(averages, self.decay), fresh, alpha=1.0 - self.decay)
        return replace(self, average=rebuild(self.average, new), count=self.count + 1)

    def debiased(self) -> Any:
        """Return the average, corrected for its start at zero."""
        weight = 1.0 - self.decay ** self.count.float()
        return rebuild(self.average, [leaf / weight.to(leaf.device, leaf.dtype) for leaf in leaves_of(self.average)])


def _wide(leaf: Tensor) -> torch.dtype:
    return leaf.dtype if leaf.is_complex() else torch.promote_types(leaf.dtype, torch.float32)


@tree_dataclass
class EarlyStopping:
    """Stop when a metric has not become smaller by `min_delta` for more than `patience` looks."""

    patience: int = static(default=0)
    min_delta: float = static(default=0.0)
    best: float = static(default=float("inf"))
    waited: int = static(default=0)
    should_stop: bool = static(default=False)

    def update(self, metric: float) -> tuple[bool, EarlyStopping]:
        """Return `(has improved, new state)`."""
        if self.best - float(metric) > self.min_delta:
            return True, replace(self, best=float(metric), waited=0)
        stop = self.waited >= self.patience or self.should_stop
        return False, replace(self, waited=self.waited + 1, should_stop=stop)


def microbatched(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return `value_and_grad` of the mean over `count` equal micro-batches, one in memory at a time.

    `function(params, batch)` returns the mean loss of its batch; the result is that of the whole batch.
    """
    both = value_and_grad(function)

    def wrapped(params: Any, batch: Any) -> tuple[Tensor, Any]:
        leaves, structure = pytree.tree_flatten(batch)
        if any(len(leaf) % count for leaf in leaves):
            raise TransformError(f"the batch does not divide into {count}", fix="choose a divisor of the batch size")
        parts = [leaf.chunk(count) for leaf in leaves]
        total: Any = 0.0
        summed: Any = None
        for i in range(count):
            value, grads = both(params, pytree.tree_unflatten([part[i] for part in parts], structure))
            found = leaves_of(grads)
            total = total + value
            summed = found if summed is None else torch._foreach_add(summed, found)
        return total / count, rebuild(params, torch._foreach_mul(summed, 1.0 / count))

    return wrapped
