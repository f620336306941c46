"""The teacher of a distillation: a model folder in its own precision and layout, run without gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from piledriver.accelerator import Accelerator
from piledriver.compress.distil.loss import Distribution
from piledriver.core.errors import ConfigError
from piledriver.data.stream.loader import TokenBatch
from piledriver.engine import Layout
from piledriver.kernels.cross_entropy import cap_logits
from piledriver.models import Transformer, make_masks
from piledriver.models.interchange import load_folder, load_weights, read_folder_config, stored_dtype
from piledriver.models.loss import LossSums, project

TeacherDtype = Literal["auto", "stored", "fp32", "bf16"]


class HiddenOutputs:
    """The teacher's last hidden states of a batch, from which the logits of a chunk follow."""

    def __init__(self, model: Transformer, hidden: Tensor, weight: Tensor, top_k: int | None) -> None:
        self._model, self._hidden, self._weight, self._top_k = model, hidden.flatten(0, -2), weight, top_k

    @torch.no_grad()
    def chunk(self, begin: int, end: int, temperature: float) -> Distribution:
        """See `TeacherOutputs`."""
        logits, softcap = self._model.project(self._hidden[begin:end], self._weight), self._model.config.logit_softcap
        if softcap is not None:
            logits = cap_logits(logits, softcap)
        if temperature != 1.0:
            logits = logits.float() / temperature
        if self._top_k is None:
            return Distribution(logits)
        best = logits.log_softmax(dim=-1, dtype=torch.float32).topk(self._top_k, dim=-1)
        return Distribution(best.values, best.indices)


class _Seen(NamedTuple):
    hidden: Tensor
    weight: Tensor


class Teacher:
    """A teacher model on this rank, whole or sharded over the data-parallel ranks."""

    def __init__(self, model: Transformer, *, top_k: int | None = None, keep_blocks: bool = False) -> None:
        self.model, self._top_k = model.eval().requires_grad_(False), top_k
        self.block_outputs: dict[int, Tensor] = {}
        """Output of each block for the last batch, if they are kept."""
        if keep_blocks:
            for name, block in model.blocks.items():
                block.register_forward_hook(partial(keep_output, self.block_outputs, int(name)))

    @torch.no_grad()
    def outputs(self, batch: TokenBatch, *, masks_documents: bool) -> HiddenOutputs:
        """Return what the teacher says about a batch."""
        config, model = self.model.config, self.model
        masks = None
        if masks_documents:
            documents = 1 << max(batch.cu_seqlens.numel() - 2, 1).bit_length()
            masks = make_masks(
                config,
                batch.inputs.shape[1],
                batch.inputs.device,
                batch.document_ids(),
                kernel=model.attention_kernel,
                max_documents=documents,
            )
        seen: list[_Seen] = []

        def keep(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> LossSums:
            seen.append(_Seen(hidden, weight))
            zero = hidden.new_zeros(())
            return LossSums(zero, zero, zero, zero, zero)

        # Through the model's own call, which gathers the weights of a sharded model; the loss is not computed.
        model.cross_entropy = keep
        model(batch.inputs, targets=batch.labels, masks=masks)
        return HiddenOutputs(model, seen[0].hidden, seen[0].weight, self._top_k)


def keep_output(outputs: dict[int, Tensor], layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
    """Keep the hidden states that a block returns (a forward hook)."""
    outputs[layer] = output[0]


def open_teacher(
    folder: str, *, dtype: TeacherDtype = "auto", layout: Layout | None = None, device: torch.device
) -> Transformer:
    """Return the model of a folder; quantised layers stay quantised.

    With layout zero 3 each rank reads and keeps a part of the weights only. `auto` is bf16 on a GPU, and the stored
    dtype elsewhere.
    """
    if dtype == "auto":
        dtype = "bf16" if device.type == "cuda" else "stored"
    wanted = {"stored": None, "fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    if layout is None or layout == Layout():
        return load_folder(folder, dtype=wanted).to(device)
    if layout.zero != 3 or max(layout.tp, layout.pp, layout.cp, layout.ep) > 1:
        raise ConfigError(
            f"the teacher's layout is {layout}: its ranks would have to read the same batches",
            fix="use {zero: 3}, or store its outputs in any layout and give teacher_logits",
        )
    config, theirs = read_folder_config(folder)
    if theirs.get("quantization_config"):
        raise ConfigError(f"{folder} is quantised and cannot be sharded", fix="leave out the teacher's layout")
    with torch.device("meta"):
        model = Transformer(config).to(wanted or stored_dtype(folder)).requires_grad_(False)
    ready: Transformer = Accelerator(layout=layout).prepare_model(model, weights=partial(load_weights, folder=folder))
    assert ready.project is project
    return ready
