"""Gradient accumulation: when gradients are averaged over ranks, and what a loss is divided by.

A window is the run of batches between two optimizer steps. Without counts a loss is divided by the number of batches in
a window, as Accelerate does. With counts (tokens, samples) the gradient of the window is the mean over every item of
every batch on every process, which is what one process with one big batch would compute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from piledriver.accelerator.options.handlers import GradientAccumulationPlugin


class GradientState:
    """Position of the loop within an accumulation window, and the data loader that it iterates over.

    >>> state = GradientState(GradientAccumulationPlugin(num_steps=2))
    >>> [state.next_batch() for _ in range(4)]
    [False, True, False, True]
    """

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.sync_gradients = True
        self.step = 0
        self.plugin_kwargs: dict[str, Any] = {}
        self._loaders: list[weakref.ref[Any]] = []
        self.is_xla_gradients_synced = False
        self.configure(gradient_accumulation_plugin)

    def configure(self, plugin: GradientAccumulationPlugin | None) -> None:
        """Adopt the plugin's settings."""
        if plugin is not None:
            self.plugin_kwargs = plugin.to_kwargs()

    @property
    def num_steps(self) -> int:
        """Return the batches per window."""
        return int(self.plugin_kwargs.get("num_steps") or 1)

    @property
    def adjust_scheduler(self) -> bool:
        """Return the plugin's setting; the scheduler steps once per optimizer step either way."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """Return whether a window ends with the data."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """Return whether gradients are averaged after every batch (less memory with sharding, more communication)."""
        return bool(self.plugin_kwargs.get("sync_each_batch", False))

    def next_batch(self) -> bool:
        """Count one batch; return whether the window ends with it."""
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.step = 0
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0
        return self.sync_gradients

    def loader_began(self, loader: Any) -> None:
        """Register a loader that is being iterated over; the innermost one counts."""
        self._loaders.append(weakref.ref(loader))

    def loader_ended(self, loader: Any) -> None:
        """Remove a loader whose iteration ended."""
        self._loaders = [one for one in self._loaders if one() is not None and one() is not loader]

    @property
    def active_dataloader(self) -> Any:
        """Return the innermost loader that is being iterated over, or None."""
        while self._loaders:
            loader = self._loaders[-1]()
            if loader is not None:
                return loader
            # The loop over it was left and the loader is gone.
            self._loaders.pop()
        return None

    @property
    def dataloader_references(self) -> list[Any]:
        """Return the loaders that are being iterated over, outermost first."""
        return [None, *(loader() for loader in self._loaders)]

    @property
    def in_dataloader(self) -> bool:
        """Return whether a prepared loader is being iterated over."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Return whether the current batch is the last one."""
        loader = self.active_dataloader
        return loader is not None and bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Return the samples in the last round over all ranks; -1 if unknown."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    # Accelerate's names for the two calls that its loaders make.
    _add_dataloader = loader_began
    _remove_dataloader = loader_ended

    def __getstate__(self) -> dict[str, Any]:
        # Loaders are referred to weakly, and a copy in another process iterates over none of them.
        return {**self.__dict__, "_loaders": []}

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )


Count = int | float | torch.Tensor


class ItemMean:
    """The mean over all items of a window: each loss is weighted by its count, and divided by the count of all.

    Until the window ends the count of all is unknown, so gradients are kept as sums; at its last batch the counts of
    all processes are added up, and what was accumulated and what is still to come are both brought to the mean.
    """

    def __init__(self) -> None:
        self.counted: Count = 0
        self.batch_weight: Count | None = None
        self._to_mean: Any = None

    @property
    def standing(self) -> tuple[Count, Count | None]:
        """Return the counts of this window, for `go_back_to`."""
        return self.counted, self.batch_weight

    def go_back_to(self, standing: tuple[Count, Count | None], gradients: Iterable[torch.Tensor]) -> None:
        """Undo a failed batch: restore the counts, and multiply `gradients` that were divided for it back to sums."""
        self.counted, self.batch_weight = standing
        if self._to_mean is not None:
            _multiply(gradients, 1 / self._to_mean)
        self._to_mean = None

    def begin_batch(
        self,
        count: Count | None,
        window_ends: bool,
        *,
        gradients: Iterable[torch.Tensor],
        add_up: Callable[[torch.Tensor], torch.Tensor],
        reduce_size: int,
        loss_is_of_all: bool = False,
        device: torch.device,
    ) -> None:
        """Begin a batch with `count` items (None: weigh batches alike).

        `gradients` are those accumulated so far, `add_up` sums a count over the `reduce_size` processes whose gradients
        are averaged. Where a loss is that of all of them (pipelines), it counts their items.
        """
        self._to_mean = None
        if count is None:
            self.batch_weight = None
            return
        if loss_is_of_all and reduce_size > 1:
            count, reduce_size = add_up(_as_tensor(count, device)), 1
        self.counted = self.counted + count
        self.batch_weight = count
        if not window_ends:
            return
        total = add_up(_as_tensor(self.counted, device)) if reduce_size > 1 else self.counted
        # Averaging over processes divides by their number, the mean over items must not.
        to_mean = reduce_size / (total.clamp(min=1) if isinstance(total, torch.Tensor) else max(total, 1))
        _multiply(gradients, to_mean)
        self._to_mean = to_mean
        self.batch_weight = count * to_mean
        self.counted = 0

    def weight(self, num_steps: int) -> Count:
        """Return the factor of a batch's loss."""
        return self.batch_weight if self.batch_weight is not None else 1 / num_steps

    def weigh(self, loss: Any, num_steps: int) -> Any:
        """Return the loss for backward."""
        if self.batch_weight is not None:
            return loss * self.batch_weight
        return loss / num_steps if num_steps != 1 else loss


def _multiply(gradients: Iterable[torch.Tensor], factor: Any) -> None:
    for gradient in gradients:
        # This rank's shard.
        (gradient.to_local() if hasattr(gradient, "to_local") else gradient).mul_(factor)


def _as_tensor(count: Count, device: torch.device) -> torch.Tensor:
    if isinstance(count, torch.Tensor):
        return count.detach().to(device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)
    return torch.tensor(float(count), device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)
