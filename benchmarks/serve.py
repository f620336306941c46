"""Serving over HTTP with streaming clients, beside the same engine offline: random weights of one shape.

    python benchmarks/serve.py                      # CUDA: the 1.2B shape in bf16; CPU: a 10M shape in fp32
    python benchmarks/serve.py --clients 64 --requests 256

`ours` is tokens per second as clients see them, with the server in a process of its own; `limit` those of the engine in
this process with the same requests, all queued at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from piledriver.core.errors import PiledriverError
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import save_folder
from piledriver.models.presets import preset
from piledriver.serve import Engine, SamplingParams
from piledriver.serve.background import start_server
from piledriver.serve.load import LoadConfig, run_load

PROMPT, NEW = 128, 128


def make_folder(folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A model with random weights and a tokenizer that has a word for each id."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(config).to(dtype)
    save_folder(model, folder)
    vocab = {"<|endoftext|>": 0, **{f"w{number}": number for number in range(1, config.vocab_size)}}
    added = [{"id": 0, "content": "<|endoftext|>", "special": True, "single_word": False, "lstrip": False}]
    added[0] |= {"rstrip": False, "normalized": False}
    words = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w1"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(words))
    return model


def offline(model: Transformer, config: LoadConfig) -> float:
    """Return tokens per second of an engine with all requests at once, after a round that compiles and captures."""
    luck, words = random.Random(1), range(model.config.vocab_size)
    engine = Engine(model)
    params = SamplingParams(max_tokens=config.answer_tokens, ignore_eos=True)
    seconds = 0.0
    for _ in range(2):
        prompts = [luck.choices(words, k=config.prompt_tokens) for _ in range(config.requests)]
        begun = time.perf_counter()
        engine.generate(prompts, params)
        seconds = time.perf_counter() - begun
    return config.requests * config.answer_tokens / seconds


def over_http(folder: Path, log: Path, load: LoadConfig) -> dict[str, Any]:
    """Return what clients of a server see, after a round that compiles and captures."""
    try:
        server = start_server(folder, ["--port", "0"], log=log)
    except PiledriverError:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    try:
        prepared_s = until_prepared(server.url)
        run_load(server.url, replace(load, seed=load.seed + 1))  # other prompts: none is found in the prefix cache
        before = steps_of(server.url)
        found = run_load(server.url, load).summary()
        return found | {"steps": steps_of(server.url) - before, "prepared_s": round(prepared_s, 1)}
    finally:
        server.stop()


def until_prepared(url: str, patience_s: float = 90.0) -> float:
    """Return how long a server that answers takes to be ready for every batch size."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < patience_s:
        with urllib.request.urlopen(f"{url}/health") as answer:
            if json.load(answer)["prepared"]:
                break
        time.sleep(0.1)
    return time.perf_counter() - begun


def steps_of(url: str) -> int:
    """Return how many steps a server's engine has run."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:iteration_tokens_total_count")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--shape", help="a preset (default: by device)")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    config = preset(args.shape or ("llama-1.2b" if gpu else "10m"), max_positions=4096)
    load = LoadConfig(requests=args.requests, clients=args.clients, prompt_tokens=PROMPT, answer_tokens=NEW)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        model = make_folder(folder, config, device, dtype)
        alone = offline(model, load)
        del model
        if gpu:
            gc.collect()
            torch.cuda.empty_cache()
        seen = over_http(folder, Path(name) / "server.log", load)
    print(
        json.dumps(
            {
                "row": "serve",
                "unit": f"tokens/s over HTTP, {args.clients} streaming clients, {PROMPT} + {NEW} tokens",
                "ours": seen["tokens_per_s"],
                "peer": None,
                "limit": round(alone, 1),
                "ratio_to_limit": round(seen["tokens_per_s"] / alone, 3),
                "first_token_ms": seen["first_token_ms"],
                "between_tokens_ms": seen["between_tokens_ms"],
                "errors": seen["errors"],
                "steps": seen["steps"],
                "prepared_s": seen["prepared_s"],
                "command": " ".join(["python", "benchmarks/serve.py", *sys.argv[1:]]),
                "device": torch.cuda.get_device_name() if gpu else "cpu",
                "torch": torch.__version__,
                "commit": subprocess.run(
                    ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
                ).stdout.strip(),
            }
        )
    )


if __name__ == "__main__":
    main()
