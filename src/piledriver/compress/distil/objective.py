"""The hook of a distillation into the train loop: targets come with what the teacher says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piledriver.compress.distil.loss import Divergence, DivergenceSettings, TeacherOutputs, linear_distillation
from piledriver.compress.distil.quantisation_aware import make_quantisation_aware
from piledriver.compress.distil.stored_logits import StoredTeacher
from piledriver.compress.distil.teacher import Teacher, TeacherDtype, keep_output, open_teacher
from piledriver.compress.scheme import Scheme
from piledriver.core.config import to_mapping
from piledriver.core.errors import ConfigError
from piledriver.data.stream.loader import TokenBatch
from piledriver.engine import Layout
from piledriver.models import Transformer
from piledriver.models.interchange import read_folder_config
from piledriver.models.loss import LossSums, linear_cross_entropy
from piledriver.train import Objective
from piledriver.train.setup import RunComponents


@dataclass(frozen=True, kw_only=True)
class DistilSettings:
    """What a student learns from its teacher."""

    teacher: str | None = None
    """Model folder of the teacher, which may be quantised."""
    teacher_dtype: TeacherDtype = "auto"
    """dtype of the teacher's weights; auto: bf16 on a GPU, the stored one elsewhere."""
    teacher_layout: Layout = field(default_factory=Layout)
    """Layout of the teacher: a replica on each rank, or {zero: 3}."""
    teacher_logits: str | None = None
    """Folder of stored outputs, in place of a teacher."""
    divergence: Divergence = "forward"
    """forward: KL(teacher || student); reverse: KL(student || teacher)."""
    temperature: float = 1.0
    """Divisor of both models' logits."""
    top_k: int | None = None
    """Compare the teacher's k likeliest tokens, and all others as one."""
    cross_entropy: float = 0.0
    """Share of the cross-entropy against the data in the loss, 0 to 1."""
    hidden: float = 0.0
    """Weight of the relative squared error of the block outputs (SquareHead: Kurtic et al., 2023)."""
    quantise: str | None = None
    """Scheme of quantisation-aware training, such as w4a16-g128."""
    skip: tuple[str, ...] = ()
    """Patterns of layer names that quantisation-aware training leaves alone."""

    def __post_init__(self) -> None:
        if self.teacher is not None and self.teacher_logits is not None:
            raise ConfigError("teacher and teacher_logits are both given", fix="leave out one of them")
        if self.teacher is None and self.teacher_logits is None and self.quantise is None:
            raise ConfigError("there is no teacher", fix="give teacher, teacher_logits or quantise")
        if not 0 <= self.cross_entropy <= 1 or self.temperature <= 0 or self.hidden < 0:
            raise ConfigError(
                f"cross_entropy is {self.cross_entropy}, temperature {self.temperature}, hidden {self.hidden}",
                fix="give 0 to 1, a positive number, and 0 or more",
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}", fix="give 1 or more, or leave it out")
        if self.teacher_logits is not None and (self.temperature != 1.0 or self.hidden or self.top_k is not None):
            raise ConfigError(
                "stored outputs have neither other temperatures, nor hidden states, nor another top_k",
                fix="remove temperature, hidden and top_k, or give teacher",
            )
        if self.quantise is not None:
            Scheme.named(self.quantise)


class DistilTargets(NamedTuple):
    """Labels of a batch, and what the teacher says about it."""

    labels: Tensor
    teacher: TeacherOutputs


class DistilObjective(Objective):
    """Minimises a mix of divergence, cross-entropy and hidden-state error; optionally with rounded weights."""

    def __init__(self, settings: DistilSettings) -> None:
        self._settings = settings
        self._mix = DivergenceSettings(settings.divergence, settings.temperature, settings.cross_entropy)
        self._teacher: Teacher | None = None
        self._stored: StoredTeacher | None = None
        self._outputs: dict[int, Tensor] = {}
        self._layers: Sequence[int] = ()
        self._channels: Tensor | None = None
        self._masks_documents = False

    def prepare(self, components: RunComponents, model: Transformer) -> None:
        """See `Objective`: open the teacher, and put the loss into the model."""
        settings, layout = self._settings, components.layout
        self._record(components, model)
        if settings.quantise is not None:
            if layout.tp > 1:
                raise ConfigError(f"quantisation-aware training with tp={layout.tp}", fix="use layout.zero instead")
            make_quantisation_aware(model, Scheme.named(settings.quantise), settings.skip)
        if settings.teacher is None and settings.teacher_logits is None:
            return
        if max(layout.tp, layout.pp, layout.cp) > 1:
            raise ConfigError(
                f"distillation with tp={layout.tp}, pp={layout.pp}, cp={layout.cp}: a rank would have a part of the "
                "student's logits only",
                fix="shard the student with layout.zero",
            )
        self._masks_documents = components.stream.config.masks_documents
        model.cross_entropy = self._loss
        if settings.teacher_logits is not None:
            self._stored = StoredTeacher(settings.teacher_logits, components.stream)
            return
        assert settings.teacher is not None
        large, _ = read_folder_config(settings.teacher)
        if large.vocab_size != model.config.vocab_size:
            raise ConfigError(
                f"the teacher has {large.vocab_size} ids, the student {model.config.vocab_size}",
                fix="use a teacher with the same tokenizer",
            )
        if settings.top_k is not None and settings.top_k > large.vocab_size:
            raise ConfigError(
                f"top_k is {settings.top_k}, the teacher has {large.vocab_size} ids",
                fix=f"give at most {large.vocab_size}, or leave it out to compare all",
            )
        teacher = open_teacher(
            settings.teacher,
            dtype=settings.teacher_dtype,
            layout=settings.teacher_layout,
            device=components.device,
        )
        self._teacher = Teacher(teacher, top_k=settings.top_k, keep_blocks=settings.hidden > 0)
        if settings.hidden:
            self._match_blocks(model, teacher)

    def _record(self, components: RunComponents, model: Transformer) -> None:
        """Add what is done to the records that the published folder has."""
        before = list((model.source_config or {}).get("compression") or [])
        given = {name: value for name, value in to_mapping(self._settings).items() if value not in (None, 0.0, [])}
        given.pop("teacher_layout", None)
        model.compression = [*before, {"act": "distil", "tokens": components.config.budget_tokens, **given}]

    def _match_blocks(self, model: Transformer, teacher: Transformer) -> None:
        self._layers, self._channels = matching_layers(model, teacher)
        for name, block in model.blocks.items():
            block.register_forward_hook(partial(keep_output, self._outputs, int(name)))

    def targets(self, batch: TokenBatch, context: Mapping[str, Any]) -> Any:
        """See `Objective`: run the teacher, or read its outputs."""
        if self._stored is not None:
            return DistilTargets(batch.labels, self._stored.outputs(batch))
        if self._teacher is None:
            return batch.labels
        return DistilTargets(batch.labels, self._teacher.outputs(batch, masks_documents=self._masks_documents))

    def _loss(self, hidden: Tensor, weight: Tensor, targets: Any, **options: Any) -> LossSums:
        """Return the loss sums; without a teacher's outputs (a validation), the cross-entropy."""
        if not isinstance(targets, DistilTargets):
            return linear_cross_entropy(hidden, weight, targets, **options)
        sums = linear_distillation(hidden, weight, targets.labels, targets.teacher, self._mix, **options)
        if not self._settings.hidden or self._teacher is None:
            return sums
        error = self._hidden_error(targets.labels, self._teacher.block_outputs)
        return sums._replace(total=sums.total + self._settings.hidden * error * sums.tokens)

    def _hidden_error(self, labels: Tensor, theirs: Mapping[int, Tensor]) -> Tensor:
        """Return the mean over blocks of |student - teacher|^2 / |teacher|^2, over the counted tokens."""
        counted = labels != -100
        total = torch.zeros((), device=labels.device)
        for layer, output in self._outputs.items():
            goal = theirs[self._layers[layer]]
            if self._channels is not None:
                goal = goal.index_select(-1, self._channels.to(goal.device))
            goal = goal[counted].float()
            total = total + (output[counted].float() - goal).square().sum() / goal.square().sum().clamp(min=1e-12)
        return total / max(len(self._outputs), 1)


def matching_layers(student: Transformer, teacher: Transformer) -> tuple[list[int], Tensor | None]:
    """Return the teacher's block for each block of the student, and its channels that the student kept.

    They follow from the student's record of structured pruning, also that of the folder it comes from; without one,
    blocks are spread evenly and widths must be equal.
    """
    records = student.compression or list((student.source_config or {}).get("compression") or [])
    cuts = [record for record in records if record.get("method") == "structured"]
    layers = list(range(teacher.config.layers))
    channels: list[int] | None = None
    for record in cuts:
        if len(record["layer_scores"]) == len(layers):
            layers = [layers[kept] for kept in record["kept_layers"]]
        if record["kept_channels"] is not None:
            before = channels or list(range(teacher.config.dim))
            channels = [before[kept] for kept in record["kept_channels"]]
    count = student.config.layers
    if len(layers) != count:
        # The last blocks match, as the first block that is not matched is the one whose input is the embedding.
        layers = [round((number + 1) * teacher.config.layers / count) - 1 for number in range(count)]
    width = teacher.config.dim if channels is None else len(channels)
    if width != student.config.dim:
        raise ConfigError(
            f"hidden states of the teacher have {teacher.config.dim} channels, the student's {student.config.dim}",
            fix="set hidden=0, or prune the student from this teacher",
        )
    return layers, None if channels is None else torch.tensor(channels)
