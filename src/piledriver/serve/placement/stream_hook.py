"""`StreamHook`: the `_hf_hook` of a module whose weights are streamed, for code that looks for one.

The stream's own hooks bring the weights; this one gives access to them by the names that Accelerate's users know
(`weights_map`, `execution_device`, `pre_forward`) and restores them when it is removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.offload.stream.model_stream import ModelStream
from piledriver.engine.offload.stream.weight_block import StreamedTensor
from piledriver.serve.placement.align_devices import AlignDevicesHook


class StreamHook(AlignDevicesHook):
    """Access to the streamed weights of one module."""

    def __init__(self, stream: ModelStream, number: int, module: nn.Module, devices: dict[str, torch.device]) -> None:
        super().__init__(execution_device=stream.device, offload=True, skip_keys=stream.skip_keys)
        self.stream, self.number = stream, number
        self.weights_map = StreamedWeights(stream, module)
        self.original_devices = devices

    @property
    def tied_params_map(self) -> dict[int, Any]:
        """Device copies of tied weights by their address on the host: none outlives its use."""
        assert self.weights_map is not None
        return {value.data_ptr(): {} for value in map(self.weights_map.__getitem__, self.weights_map)}

    @tied_params_map.setter
    def tied_params_map(self, _: Any) -> None:
        return

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return the module as it is: the stream has taken its weights."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Bring the weights of the module's group; return the arguments on the device."""
        self.stream.need(self.number)
        return self.stream.to_device(args, kwargs) or (args, kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Take the weights of the group out, unless it is in use further out."""
        self.stream.done(self.number)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Stop streaming the module's weights and restore them to the devices that they came from."""
        for name, value in self.stream.forget(module).items():
            device = self.original_devices.get(name, torch.device("cpu"))
            if device.type != "meta":
                _hold(module, name, value.to(device))
        return module

    @contextmanager
    def aligned(self, module: nn.Module, device: Any) -> Iterator[None]:
        """Keep the module's own weights on a device (default: the execution device) within the block."""
        own = StreamedWeights(self.stream, module)
        before = {name: _held(module, name) for name in own if "." not in name}
        for name in before:
            _hold(module, name, own[name].to(self.execution_device if device is None else device))
        try:
            yield
        finally:
            for name, tensor in before.items():
                (module._buffers if name in module._buffers else module._parameters)[name] = tensor  # type: ignore[assignment]


def _held(module: nn.Module, name: str) -> Tensor | None:
    return module._buffers[name] if name in module._buffers else module._parameters[name]


def _hold(module: nn.Module, name: str, value: Tensor) -> None:
    if name in module._buffers:
        module._buffers[name] = value
        return
    held = module._parameters[name]
    module._parameters[name] = nn.Parameter(value, requires_grad=held is not None and held.requires_grad)


class StreamedWeights(Mapping[str, Tensor]):
    """The streamed weights of a module and its submodules by name, in host memory; those on disk are read."""

    def __init__(self, stream: ModelStream, module: nn.Module) -> None:
        self.stream, self.module = stream, module

    def _found(self) -> dict[str, StreamedTensor]:
        names = {id(inner): name for name, inner in self.module.named_modules()}
        found: dict[str, StreamedTensor] = {}
        for block in self.stream.blocks:
            for tensor in block.tensors:
                for owner, leaf in tensor.owners:
                    if id(owner) in names:
                        found[f"{names[id(owner)]}.{leaf}".lstrip(".")] = tensor
        return found

    def __getitem__(self, name: str) -> Tensor:
        return self._found()[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())
