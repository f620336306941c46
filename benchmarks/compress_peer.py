"""GPTQ, Wanda and SparseGPT beside llm-compressor: one model, the same calibration tokens, bits per byte of each.

    python benchmarks/compress_peer.py --model MODEL --tokens TOKENS --corpus CORPUS        # a CPU is enough

MODEL is a folder of a trained model (`piledriver demo` makes one), TOKENS its token shards, CORPUS unseen text shards.
Both tools get the same windows without document masks. What llm-compressor writes is read by `load_folder` and scored
as ours is. `ours` and `peer` are bits per byte lost against the dense model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from piledriver import compress
from piledriver.compress.measure import paired_change
from piledriver.corpus import Document, read_shards
from piledriver.data import StreamConfig, open_stream
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.evaluate import DocumentScore, TransformerScorer, bits_per_byte, summarise
from piledriver.evaluate.validation import spread
from piledriver.models import Transformer
from piledriver.models.interchange import load_folder


def recipes(scheme: compress.Scheme) -> dict[str, Any]:
    """Return llm-compressor's modifiers with the settings that ours have by default."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier

    weights = QuantizationArgs(num_bits=4, group_size=scheme.group, symmetric=scheme.symmetric, strategy="group")
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    return {
        "gptq": GPTQModifier(config_groups=groups, ignore=["lm_head"], actorder="static", dampening_frac=0.01),
        "wanda": WandaPruningModifier(sparsity=0.5, targets=["Linear"], ignore=["re:.*lm_head"]),
        "sparsegpt": SparseGPTModifier(sparsity=0.5, targets=["Linear"], ignore=["re:.*lm_head"], dampening_frac=0.01),
    }


def by_peer(model: str, tokens: torch.Tensor, recipe: Any, out: str) -> Transformer:
    """Return what llm-compressor makes of a model folder."""
    import datasets
    import transformers
    from llmcompressor import oneshot

    data = datasets.Dataset.from_dict(
        {"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()}
    )
    dense = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = oneshot(
        model=dense,
        dataset=data,
        recipe=[recipe],
        num_calibration_samples=len(tokens),
        shuffle_calibration_samples=False,
        max_seq_length=tokens.shape[1],
        batch_size=8,
        pipeline="sequential",
        processor=transformers.PreTrainedTokenizerFast(tokenizer_file=os.path.join(model, "tokenizer.json")),
    )
    made.save_pretrained(out, save_compressed=True)
    return load_folder(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--scheme", default="w4a16-g64")
    parser.add_argument("--methods", default="gptq,wanda,sparsegpt")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--characters", type=int, default=3000)
    options = parser.parse_args()
    tokenizer = open_tokenizer(options.model)
    documents = [
        Document(document.text[: options.characters], source=document.source)
        for document in spread(read_shards(options.corpus), options.documents)
    ]
    model = load_folder(options.model)
    stream = open_stream(StreamConfig(tokens=options.tokens, seq_len=model.config.max_positions, packing="joined"))
    tokens = compress.Calibration.of(stream, samples=options.samples).tokens

    def scores(small: Transformer) -> list[DocumentScore]:
        return bits_per_byte(TransformerScorer(small), tokenizer, documents, batch_tokens=4096)

    dense = scores(model)
    bits = summarise(dense)["all"].bits_per_byte
    ours: dict[str, Callable[[], Transformer]] = {
        "gptq": lambda: compress.quantise(model, options.scheme, method="gptq", data=tokens),
        "wanda": lambda: compress.prune(model, 0.5, method="wanda", data=tokens),
        "sparsegpt": lambda: compress.prune(model, 0.5, method="sparsegpt", data=tokens),
    }
    for method in options.methods.split(","):
        with tempfile.TemporaryDirectory() as folder:
            theirs = scores(
                by_peer(options.model, tokens, recipes(compress.Scheme.named(options.scheme))[method], folder)
            )
        mine = scores(ours[method]())
        lost = [summarise(one)["all"].bits_per_byte - bits for one in (mine, theirs)]
        row = {
            "row": f"compress_peer: {method}",
            "dense": round(bits, 5),
            "ours": round(lost[0], 6),
            "peer": round(lost[1], 6),
            "unit": "bits per byte lost",
            "ours_over_peer": round(lost[0] / lost[1], 4),
            "ours_against_peer": [round(value, 6) for value in paired_change(theirs, mine)],
            "samples": options.samples,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
