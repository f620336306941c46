"""Calibration: run a model block by block over sample text, and collect statistics of the inputs of its layers.

One block is on the device at a time; the hidden states of the samples wait on the host. Memory is therefore that of one
block, its statistics and one batch of activations, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from piledriver.core.errors import UsageError
from piledriver.core.progress import track
from piledriver.data import Cursor, TokenStream
from piledriver.models import Transformer, make_masks
from piledriver.models.block import Block
from piledriver.models.interchange import load_folder


class Calibration(NamedTuple):
    """Sample text, and where it comes from."""

    tokens: Tensor
    """[samples, time]."""
    document_ids: Tensor | None = None
    """[samples, time]; None where attention may cross documents."""
    origin: Mapping[str, Any] = {}
    """Where the samples are from: the token shards and the cursor, for the record."""

    @classmethod
    def of(cls, data: Tensor | TokenStream | Calibration, *, samples: int, cursor: Cursor | None = None) -> Calibration:
        """Return `samples` windows of a stream from a cursor on (default: its start), or of a tensor of tokens.

        A stream is read for at most as many windows as its shards hold.
        """
        if isinstance(data, Calibration):
            return data
        if isinstance(data, Tensor):
            if data.dim() != 2 or data.is_floating_point():
                raise UsageError(
                    f"calibration tokens are {tuple(data.shape)} of {data.dtype}", fix="give [samples, time] token ids"
                )
            return cls(data[:samples].long(), origin={"samples": min(samples, len(data))})
        if data.config.packing == "document":
            raise UsageError("calibration text is padded with packing=document", fix="use packed, joined or best_fit")
        start = cursor or data.start
        samples = min(samples, sum(data.windows.counts.values()))
        batch = data.read(data.index_of(start), samples)
        ids = torch.from_numpy(batch.document_ids()) if data.config.masks_documents else None
        origin = {
            "tokens": data.config.tokens,
            "samples": samples,
            "length": data.config.seq_len,
            "cursor": {"seed": start.seed, "epoch": start.epoch, "index": start.index},
        }
        return cls(torch.from_numpy(batch.inputs.astype("int64")), ids, origin)


def open_for_blocks(folder: str, device: torch.device | str | None) -> tuple[Transformer, torch.device]:
    """Return a model with its blocks on the host and all else on the device, to which one block at a time is moved.

    The default device is a GPU if there is one.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = load_folder(folder)
    blocks, model.blocks = model.blocks, nn.ModuleDict()
    model.to(place)
    model.blocks = blocks
    return model, place


def each_block(model: Transformer, label: str, show_progress: bool) -> Iterator[tuple[str, Block]]:
    """Yield the blocks of a model by name; show progress on standard error if asked to."""
    blocks = cast(Iterable[tuple[str, Block]], model.blocks.items())
    return iter(track(blocks, label, total=len(model.blocks), unit="blocks") if show_progress else blocks)


class LayerStatistics:
    """Sums over the inputs of a linear layer: their second moments, and the size of each channel."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.rows = 0
        self.moments = torch.zeros(columns, columns, device=device)
        """Sum of x x^T over all tokens: the Hessian of the squared error of the output, up to a factor."""
        self.magnitudes = torch.zeros(columns, device=device)
        """Sum of |x|."""
        self.largest = torch.zeros(columns, device=device)
        """Largest |x|."""

    def add(self, x: Tensor) -> None:
        """Add inputs of [..., columns]."""
        flat = x.detach().flatten(0, -2)
        self.rows += len(flat)
        if flat.is_cuda and flat.dtype in (torch.bfloat16, torch.float16):
            # Products of 16-bit values are exact in fp32, in which the tensor cores add them up.
            self.moments += torch.mm(flat.t(), flat, out_dtype=torch.float32)
        else:
            flat = flat.float()
            self.moments.addmm_(flat.t(), flat)
        size = flat.abs()
        self.magnitudes += size.sum(dim=0, dtype=torch.float32)
        self.largest = torch.maximum(self.largest, size.amax(dim=0).float())

    @property
    def hessian(self) -> Tensor:
        """Mean of x x^T."""
        return self.moments / max(self.rows, 1)

    @property
    def mean_magnitude(self) -> Tensor:
        """Mean of |x|."""
        return self.magnitudes / max(self.rows, 1)

    def scaled(self, scale: Tensor) -> LayerStatistics:
        """Return the statistics of inputs that are divided by `scale`, channel by channel."""
        other = LayerStatistics(0, scale.device)
        other.rows = self.rows
        other.moments = self.moments / torch.outer(scale, scale)
        other.magnitudes, other.largest = self.magnitudes / scale, self.largest / scale
        return other


class _Recorder(nn.Module):
    """Takes the place of a block: keeps the arguments of its call and returns its input."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.window, self.rope = block.window, block.rope
        self.arguments: tuple[Any, ...] = ()

    def forward(self, x: Tensor, *arguments: Any) -> tuple[Tensor, None]:
        """Keep the arguments after the hidden states, and the hidden states."""
        self.hidden, self.arguments = x, arguments
        return x, None


class _AllSeenError(Exception):
    """Every layer that statistics are collected of has had its input."""


class BlockWalk:
    """The hidden states of samples, before the block that is next.

    >>> from piledriver.models import ModelConfig
    >>> model = Transformer(ModelConfig(vocab_size=32, dim=16, layers=2, heads=2))
    >>> walk = BlockWalk(model, Calibration(torch.randint(32, (2, 8))))
    >>> block = model.blocks["0"]
    >>> walk.statistics("0", block, {"attention.qkv": block.attention.qkv})["attention.qkv"].rows
    16
    >>> walk.advance("0", block)
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Transformer,
        calibration: Calibration,
        *,
        device: torch.device | str = "cpu",
        batch_tokens: int = 8192,
    ) -> None:
        self.device = torch.device(device)
        time = calibration.tokens.shape[1]
        if time > model.config.max_positions:
            raise UsageError(
                f"calibration windows have {time} tokens, the model takes {model.config.max_positions}",
                fix="use shorter windows",
            )
        rows = max(1, batch_tokens // time)
        self.states: list[Tensor] = []
        self._batch = 0
        self._reused: list[nn.Module] = []
        self._arguments: list[dict[str, tuple[Any, ...]]] = []
        for first in range(0, len(calibration.tokens), rows):
            ids = calibration.document_ids
            self._enter(
                model,
                calibration.tokens[first : first + rows],
                None if ids is None else ids[first : first + rows],
            )

    def _enter(self, model: Transformer, tokens: Tensor, document_ids: Tensor | None) -> None:
        place = model.device
        masks = make_masks(model.config, tokens.shape[1], place, document_ids, kernel=model.attention_kernel)
        real = model.blocks
        recorders = {name: _Recorder(block) for name, block in real.items()}
        model.blocks = nn.ModuleDict(recorders)
        try:
            model.run(tokens.to(place), masks=masks)
        finally:
            model.blocks = real
        self.states.append(self._to_host(next(iter(recorders.values())).hidden))
        self._arguments.append({name: recorder.arguments for name, recorder in recorders.items()})

    def _to_device(self, index: int) -> Tensor:
        return self.states[index].to(self.device, non_blocking=True)

    def _to_host(self, x: Tensor, buffer: Tensor | None = None) -> Tensor:
        """Return a copy on the host, in `buffer` if it fits; in page-locked memory, which a GPU reads at full speed."""
        if self.device.type != "cuda":
            return x.cpu()
        if buffer is None or buffer.shape != x.shape or buffer.dtype != x.dtype or not buffer.is_pinned():
            buffer = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        # On the stream that also reads the buffer: copies keep their order.
        return buffer.copy_(x, non_blocking=True)

    @torch.no_grad()
    def outputs(self, name: str, block: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the block's input and output for each batch of samples, on the device; the block is moved there."""
        for index in range(len(self.states)):
            yield self._to_device(index), self.output(name, block, index)

    def output(self, name: str, block: nn.Module, index: int) -> Tensor:
        """Return the block's output for one batch of samples, with gradients; the block is moved to the device."""
        block.to(self.device)
        self._batch = index
        moved = [_to(argument, self.device) for argument in self._arguments[index][name]]
        out: Tensor = block(self._to_device(index), *moved)[0]
        return out

    def statistics(self, name: str, block: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, LayerStatistics]:
        """Return the statistics of the inputs of some layers of a block; what follows the last of them is not run."""
        found = {key: LayerStatistics(cast(int, layer.in_features), self.device) for key, layer in layers.items()}
        waiting: set[str] = set()

        def hook(key: str) -> Any:
            def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                found[key].add(inputs[0])
                waiting.discard(key)
                if not waiting:
                    raise _AllSeenError

            return add

        handles = [layer.register_forward_pre_hook(hook(key)) for key, layer in layers.items()]
        try:
            for index in range(len(self.states) if layers else 0):
                waiting.update(layers)
                with suppress(_AllSeenError), torch.no_grad():
                    self.output(name, block, index)
        finally:
            for handle in handles:
                handle.remove()
        missed = [key for key, statistics in found.items() if not statistics.rows]
        if missed:
            raise UsageError(f"blocks.{name}.{missed[0]} is never called", fix="skip it, or leave it out of layers")
        return found

    def inputs(self, name: str, block: nn.Module, module: nn.Module) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments with which a block calls one of its modules, for each batch; what follows is not run."""
        for index in range(len(self.states)):
            seen: list[tuple[Any, ...]] = []

            def keep(_: nn.Module, inputs: tuple[Any, ...], seen: list[tuple[Any, ...]] = seen) -> None:
                seen.append(inputs)
                raise _AllSeenError

            handle = module.register_forward_pre_hook(keep)
            try:
                with suppress(_AllSeenError), torch.no_grad():
                    self.output(name, block, index)
            finally:
                handle.remove()
            yield seen[0]

    def reuse(self, layer: nn.Module) -> None:
        """Compute the outputs of a layer that will not change any more once for each batch, until `advance`.

        On a CPU the products of a block would otherwise be computed again for each group of layers after them. A GPU
        computes them faster than it reads them from the host.
        """
        if self.device.type != "cpu":
            return
        known: dict[int, Any] = {}
        compute = layer.forward

        def forward(*inputs: Any) -> Any:
            if self._batch not in known:
                known[self._batch] = compute(*inputs)
            return known[self._batch]

        layer.forward = forward
        self._reused.append(layer)

    def advance(self, name: str, block: nn.Module) -> None:
        """Replace the hidden states by the block's outputs."""
        self.states = [self._to_host(out, self.states[i]) for i, (_, out) in enumerate(self.outputs(name, block))]
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the host may read the states now
        for layer in self._reused:
            del layer.forward
        self._reused.clear()


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to(part, device) for part in value))
    return value
