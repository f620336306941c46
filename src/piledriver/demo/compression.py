"""The demo of compression: prune, recover, quantise, report and serve the demo's own model."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from typing import Any

from piledriver import compress
from piledriver.compress.distil import DistilConfig, DistilSettings, distil, reconstruct
from piledriver.core import storage
from piledriver.core.errors import UsageError
from piledriver.corpus import Document
from piledriver.data import StreamConfig, open_stream
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.demo.run import train_demo_model
from piledriver.evaluate.validation import read_spread
from piledriver.models import Transformer
from piledriver.models.interchange import copy_model_files, load_folder, save_folder
from piledriver.optim import OptimizerConfig
from piledriver.serve import Engine, SamplingParams
from piledriver.train import DataConfig, TrainConfig

_SHARE = 0.7
_SCHEME = "w4a16-g32"
_CHARACTERS = 3000
# The demo trains with Muon at 0.01; recovery takes few steps from there.
_OPTIMIZER = OptimizerConfig(kind="muon", lr=0.005)
# Few steps: a higher rate only does harm.
_RECONSTRUCTION_LR = 5e-5
# A teacher of a minute's training knows little: half of the loss is the text's own.
_CROSS_ENTROPY = 0.5


def run_compression_demo(
    out: str,
    *,
    minutes: float = 0.75,
    workers: int = 1,
    samples: int = 32,
    documents: int = 24,
    new_tokens: int = 16,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Compress the model of the demo in `out`, which is trained first if it is not there; return the report.

    `minutes` is the time of training in that case; a third of it is spent on recovery. `samples` are the windows of
    calibration text, `documents` those that the report is measured on; `new_tokens` are decoded to measure speed.
    """
    if not 0 < minutes < math.inf:
        raise UsageError(f"{minutes:g} minutes", fix="give a positive number")
    dense = os.path.join(out, "run", "model")
    if not storage.exists(os.path.join(dense, "config.json")):
        say(f"{dense} is not there: training a small model on this machine's own files first")
        train_demo_model(out, minutes=minutes, workers=workers, say=say)
    tokens = os.path.join(out, "tokens")
    model = load_folder(dense)
    stream = open_stream(StreamConfig(tokens=tokens, seq_len=model.config.max_positions))
    plan = compress.plan(model, f"params:{_SHARE}+{_SCHEME}")
    say(plan.as_text())
    folders = {name: os.path.join(out, "compressed", name) for name in ("pruned", "recovered", "quantised")}
    data: dict[str, Any] = {"data": stream, "samples": samples}
    pruned = compress.prune(model, plan, **data)
    _save(pruned, dense, folders["pruned"])
    say(f"pruned: {folders['pruned']}")
    run = _recover(pruned, model, dense, tokens, out, minutes, data)
    _save(run, dense, folders["recovered"])
    say(f"recovered: {folders['recovered']}")
    small = compress.quantise(run, _SCHEME, method="gptq", head="int8", **data)
    _save(small, dense, folders["quantised"])
    say(f"quantised: {folders['quantised']}")
    report = compress.report(
        {"dense": dense, **folders},
        _held_out(os.path.join(out, "corpus", "test"), documents),
        out=os.path.join(out, "compressed"),
        new_tokens=new_tokens,
    )
    tokenizer = open_tokenizer(dense)
    engine = Engine(load_folder(folders["quantised"]), tokenizer)
    [answer] = engine.generate(["The "], SamplingParams(max_tokens=24, temperature=0.7, seed=1))
    engine.stop()
    report["sample"] = answer.completions[0].text
    return report


def _recover(
    pruned: Transformer, model: Transformer, dense: str, tokens: str, out: str, minutes: float, data: dict[str, Any]
) -> Transformer:
    """Return the pruned model after block-wise reconstruction and a short distillation."""
    fitted = reconstruct(pruned, model, epochs=2, lr=_RECONSTRUCTION_LR, batch_tokens=2048, **data)
    start, run = os.path.join(out, "compressed", "reconstructed"), os.path.join(out, "compressed", "run")
    save_folder(fitted, start)
    shutil.rmtree(run, ignore_errors=True)
    settings = TrainConfig(
        model=start,
        data=DataConfig(tokens=tokens),
        batch_tokens=2048,
        budget_minutes=minutes / 3,
        out=run,
        optimizer=_OPTIMIZER,
        checkpoint_minutes=60,
        trackers=(),
        plots=False,
    )
    distil(DistilConfig(train=settings, distil=DistilSettings(teacher=dense, cross_entropy=_CROSS_ENTROPY)))
    return load_folder(os.path.join(run, "model"))


def _save(model: Transformer, dense: str, folder: str) -> None:
    storage.make_folder(folder)
    copy_model_files(dense, folder)
    save_folder(model, folder)


def _held_out(corpus: str, documents: int) -> list[Document]:
    chosen = read_spread(corpus, documents)
    return [Document(document.text[:_CHARACTERS], source=document.source) for document in chosen]
