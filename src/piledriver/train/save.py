"""Save a run: checkpoints to resume from, and the finished model in Hugging Face format."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from piledriver.checkpoint import Checkpointer, Contents, folder_for, is_complete
from piledriver.core import storage
from piledriver.core.config import to_mapping
from piledriver.core.errors import PiledriverError, StorageError
from piledriver.data.tokens.token_set import open_tokens
from piledriver.engine.shards.full_state_dict import full_tensors
from piledriver.models import ModelConfig
from piledriver.models.interchange import InterchangeError, save_folder, write_config
from piledriver.runtime.collectives.operations import broadcast_object
from piledriver.train.config import TrainConfig
from piledriver.train.pretrained import copy_tokenizer_files
from piledriver.train.resume import CHECKPOINTS, damaged
from piledriver.train.setup import RunComponents
from piledriver.train.step import TrainStep

MODEL = "model"


def why_not_published(shape: ModelConfig) -> str | None:
    """Return why a model of this shape cannot be published in Hugging Face format; None if it can."""
    try:
        write_config(shape)
    except InterchangeError as error:
        return error.what
    return None


class Saving:
    """Saves checkpoints of a run when they are due, and publishes its model."""

    def __init__(self, components: RunComponents, train_step: TrainStep, loader: Any, total_steps: int) -> None:
        self._components, self._train_step, self._total_steps = components, train_step, total_steps
        self._saver = Checkpointer()
        self._contents = Contents(
            models=[train_step.model],
            optimizers=[train_step.optimizer],
            schedulers=[train_step.scheduler],
            loaders=[loader],
            custom=[train_step.watch],
            scaler=components.accelerator.scaler,
        )
        self._last = time.monotonic()

    def resume(self) -> int:
        """Load the checkpoint that the run resumes from, if any; return the number of steps already done."""
        found = self._components.checkpoint
        if found is None:
            return 0
        try:
            return int(self._saver.load(found, self._contents).step or 0)
        except StorageError as error:
            raise damaged(found, error.what) from error

    def is_late(self) -> bool:
        """Return whether a save is due by this rank's clock. Clocks differ, so ranks vote on it."""
        return time.monotonic() - self._last > 60 * self._components.config.checkpoint_minutes

    def is_due(self, step: int, late: bool) -> bool:
        """Return whether to save after this step; `late`: a save is due by the clock of at least one rank."""
        config = self._components.config
        if config.checkpoint_steps is not None:
            return step % config.checkpoint_steps == 0
        return late and not (config.spikes.rolls_back and step % config.spikes.snapshot_steps)

    def save(self, step: int) -> None:
        """Save a checkpoint of this step, asynchronously unless a tier is on disk, of which the host holds no copy."""
        self._last = time.monotonic()
        folder = folder_for(os.path.join(self._components.config.out, CHECKPOINTS), step, style="step-{}")
        if is_complete(folder):
            return  # saved before a roll-back
        self._saver.save(
            folder,
            self._contents,
            step=step,
            layout=to_mapping(self._components.layout),
            extra={"total_steps": self._total_steps, "batching": asdict(self._components.batching)},
            asynchronous=not self._components.layout.tiers.uses_disk,
            total_limit=self._components.config.keep_checkpoints,
        )

    def wait(self) -> None:
        """Wait until every checkpoint is written."""
        self._saver.wait()

    def publish(self) -> None:
        """Write the model as a folder that `transformers` and `piledriver evaluate` read, with its tokenizer.

        Rank 0 writes; a sharded model is gathered tensor by tensor, so no rank holds all of it. A failure on rank 0
        fails every rank.
        """
        folder, model = os.path.join(self._components.config.out, MODEL), self._train_step.model
        weights = full_tensors(model, self._components.accelerator.mesh)
        failure: PiledriverError | None = None
        if self._components.world.is_main:
            try:
                extra = publish_tokenizer(self._components.config, self._components.tokens, folder)
                save_folder(model, folder, weights=weights, extra=extra)
            except PiledriverError as error:
                failure = error
        deque(weights, maxlen=0)  # every rank takes part in gathering each tensor, also after a failure on rank 0
        failure = broadcast_object(self._components.world, failure)
        if failure is not None:
            raise failure


def publish_tokenizer(config: TrainConfig, tokens: storage.Location, folder: storage.Location) -> dict[str, int]:
    """Copy the tokenizer of token shards to a model folder; return the token ids for the model's config.

    A model from a Hugging Face folder keeps the files and ids of that folder if its tokenizer is that of the shards.
    A `tokenizer.json` gets the `tokenizer_config.json` that `AutoTokenizer` reads. The document boundary is both bos
    and eos: training puts it between documents, evaluation before them.
    """
    if copy_tokenizer_files(config, tokens, folder):
        return {}
    opened = open_tokens(tokens)
    tokenizer, boundary = opened.tokenizer(), opened.boundary
    storage.write_bytes(storage.join(folder, opened.manifest["tokenizer"]["file"]), tokenizer.content)
    if tokenizer.suffix == ".json":
        name = next(name for name, number in tokenizer.specials.items() if number == boundary)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": name,
            "eos_token": name,
            "clean_up_tokenization_spaces": False,
        }
        storage.write_text(storage.join(folder, "tokenizer_config.json"), json.dumps(settings, indent=2) + "\n")
    return {"bos_token_id": boundary, "eos_token_id": boundary}
