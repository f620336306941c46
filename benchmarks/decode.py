"""Decoding with the engine beside `transformers`, in the same run: random weights of one shape, random prompts.

    python benchmarks/decode.py                     # CUDA: the 1.2B shape in bf16; CPU: a 124M shape in fp32
    python benchmarks/decode.py --rows batch1,batch32,deterministic --no-peer

Tokens per second are new tokens over wall time, the prompts' prefill included. The peers are `generate` with a static
cache (`peer`) and `generate_batch`, continuous batching with CUDA graphs (`peer_batch`, 64 new tokens, from 32 requests
on). One JSON line per row: `ours`, the peers, and `limit` where reading the weights and the cache bounds it.
`structured` needs llguidance and is skipped without it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from piledriver.core.errors import MissingDependencyError
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import save_folder
from piledriver.models.presets import preset
from piledriver.models.quantised import quantise_linears
from piledriver.serve import Engine, SamplingParams

COPY_BYTES_PER_SECOND = 4.24e12  # one H200, read and write together
PROMPT, NEW = 128, 256
PEER_BATCH_NEW = 64
ROWS = "int8,int4,deterministic,start,structured,prefill,prefix,batch1,batch32,batch256,fp8"


def prompts(config: ModelConfig, count: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (count, length), generator=generator).tolist()


def greedy(new: int) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)


def timed(run: Callable[[], object], repeats: int = 3, warm_up: int = 2) -> float:
    """Return the median seconds of a call after those that warm up (on a GPU: compile, then capture)."""
    for _ in range(warm_up):
        run()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def decode_rate(engine: Engine, count: int, prompt: int = PROMPT, new: int = NEW, repeats: int = 3) -> float:
    """Return new tokens per second of `count` requests at once."""
    asked = prompts(engine.model.config, count, prompt)
    return count * new / timed(lambda: engine.generate(asked, greedy(new)), repeats)


def fresh(config: ModelConfig, device: str, dtype: torch.dtype) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config)
    model.to(dtype).to_empty(device=device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model.requires_grad_(False)


def make_engine(model: Transformer, **settings: Any) -> Engine:
    return Engine(model, **{"max_context": 4096, "prefix_cache": False, "memory_fraction": 0.6, **settings})


def say(row: str, **figures: Any) -> None:
    print(json.dumps({"row": row, **figures}), flush=True)


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_peer(folder: str, model: Transformer) -> Any:
    """Return the same weights as a model of transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    weight = next(model.parameters())
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=weight.dtype).to(weight.device).eval()


@torch.inference_mode()
def peer_rate(peer: Any, config: ModelConfig, count: int, *, static: bool, repeats: int = 1) -> float:
    tokens = torch.tensor(prompts(config, count, PROMPT), device=peer.device)
    options = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "pad_token_id": 0}
    if static:
        options["cache_implementation"] = "static"
    mask = torch.ones_like(tokens)
    warm_up = 2 if count == 1 else 1
    return count * NEW / timed(lambda: peer.generate(tokens, attention_mask=mask, **options), repeats, warm_up)


def peer_batch_rate(peer: Any, config: ModelConfig, count: int) -> float | None:
    """Return tokens per second of `generate_batch`; None, with the reason on standard error, if it fails here."""
    import transformers

    batching: Any = transformers.ContinuousBatchingConfig(use_cuda_graph=True)
    if hasattr(batching, "auto_switch_to_flash"):
        batching.auto_switch_to_flash = False  # it would download kernels
    new = PEER_BATCH_NEW
    settings = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    options = {"continuous_batching_config": batching, "persistent_manager": True}
    asked = prompts(config, count, PROMPT)

    def run() -> None:
        found = peer.generate_batch(inputs=asked, generation_config=settings, **options)
        made = sum(len(output.generated_tokens) for output in found.values())
        if made != count * new:
            raise RuntimeError(f"{made} tokens of {count * new}")

    try:
        return count * new / timed(run, 1, 1)
    except Exception as error:
        print(f"generate_batch: {type(error).__name__}: {error}", file=sys.stderr)
        return None


class Letters:
    """A tokenizer.json of byte-level tokens: all bytes, then words of letters up to `size` tokens."""

    suffix = ".json"

    def __init__(self, size: int) -> None:
        luck = random.Random(0)
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in shown]
        names = {byte: chr(byte) for byte in shown} | {byte: chr(256 + at) for at, byte in enumerate(others)}
        vocab = {"<|endoftext|>": 0} | {names[byte]: byte + 1 for byte in range(256)}
        while len(vocab) < size:
            vocab.setdefault("".join(luck.choices("etaoinshrdlucmfwypvbgkjqxz", k=luck.randint(2, 8))), len(vocab))
        added = {"id": 0, "content": "<|endoftext|>", "special": True}
        added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": None, "byte_fallback": False}
        parts = {"version": "1.0", "added_tokens": [added], "pre_tokenizer": byte_level, "decoder": byte_level}
        self.content = json.dumps({**parts, "normalizer": None, "post_processor": None, "model": model}).encode()


def structured_rates(engine: Engine, count: int = 32, new: int = NEW) -> tuple[float, float]:
    """Return tokens per second of answers that must be JSON of a schema, and of the same requests without it."""
    from piledriver.serve.structured.grammar import GrammarCompiler

    config = engine.model.config
    compiler = GrammarCompiler(Letters(config.vocab_size), config.vocab_size, frozenset([0]))  # type: ignore[arg-type]
    record = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}}
    record |= {"required": ["name", "size"], "additionalProperties": False}
    grammar = compiler.json_schema({"type": "array", "items": record, "minItems": 1000})
    params, asked = SamplingParams(max_tokens=new, ignore_eos=True), prompts(config, count, PROMPT)

    def run(constrained: bool) -> None:
        for prompt in asked:
            engine.add_request(prompt, params, constraints=[grammar.constraint()] if constrained else [])
        while engine.busy:
            for event in engine.step():
                assert event.error is None, event.error

    return count * new / timed(lambda: run(True)), count * new / timed(lambda: run(False))


class GpuRows:
    """The rows of the 1.2B shape in bf16. A rate that several rows need is measured once."""

    def __init__(self, with_peer: bool) -> None:
        self.config = preset("llama-1.2b", max_positions=4096)
        self.model = fresh(self.config, "cuda", torch.bfloat16)
        self.with_peer = with_peer
        self._peer: Any = None
        self._folder = tempfile.TemporaryDirectory()
        weight_bytes = sum(parameter.numel() for parameter in self.model.parameters()) * 2
        self.limits = {1: COPY_BYTES_PER_SECOND / weight_bytes, 32: 49_500.0, 256: 194_000.0}

    @functools.cached_property
    def engine(self) -> Engine:
        return make_engine(self.model)

    @functools.cached_property
    def folder(self) -> str:
        save_folder(self.model, self._folder.name)
        return self._folder.name

    @functools.cache  # noqa: B019 - one object in the process
    def rate(self, count: int) -> float:
        found = decode_rate(self.engine, count)
        print(f"batch {count}: {found:.0f}", file=sys.stderr, flush=True)
        return found

    def batch(self, count: int) -> None:
        rate = self.rate(count)
        peers: dict[str, Any] = {}
        if self.with_peer:
            self._peer = self._peer or load_peer(self.folder, self.model)
            # At one request `generate_batch` is several times slower than `generate`, which is then the peer.
            batched = peer_batch_rate(self._peer, self.config, count) if count > 1 else None
            peers["peer"] = round(peer_rate(self._peer, self.config, count, static=True))
            peers |= {} if batched is None else {"peer_batch": round(batched)}
        say(f"decode batch {count}", ours=round(rate), **peers, limit=round(self.limits[count]))

    def quantised(self, kind: str) -> None:
        head = "fp8" if kind == "fp8" else "int8"
        small = quantise_linears(fresh(self.config, "cuda", torch.bfloat16), kind, head=head)  # type: ignore[arg-type]
        engine = make_engine(small, kv_dtype="fp8" if kind == "fp8" else "auto")
        name = "fp8 weights and cache" if kind == "fp8" else f"{kind} blocks, int8 head"
        for count in (1, 32):
            say(f"{name}, batch {count}", ours=round(decode_rate(engine, count)))
        del engine, small
        release()

    def deterministic(self) -> None:
        engine = make_engine(self.model, deterministic=True)
        for count in (1, 32):
            rate = decode_rate(engine, count)
            share = round(rate / self.rate(count), 3)
            say(
                f"deterministic batch {count}",
                ours=round(rate),
                default=round(self.rate(count)),
                share_of_default=share,
            )
        del engine
        release()

    def prefill(self) -> None:
        asked = prompts(self.config, 32, 2048)
        seconds = timed(lambda: self.engine.generate(asked, greedy(1)))
        say("prefill of 2048-token prompts", ours=round(32 * 2048 / seconds), limit=372_000)

    def structured(self) -> None:
        held, free = structured_rates(self.engine)
        say("structured batch 32", ours=round(held), free=round(free), share_of_free=round(held / free, 3))

    def prefix(self) -> None:
        shared = prompts(self.config, 1, 2048)[0]
        found = {}
        for reuse in (False, True):
            engine = make_engine(self.model, prefix_cache=reuse)
            counter = iter(range(10**6))

            def asked_for(engine: Engine = engine, counter: Any = counter) -> None:
                own = prompts(self.config, 64, 228, seed=next(counter))
                engine.generate([[*shared, *tokens] for tokens in own], greedy(32))

            found[reuse] = 64 / timed(asked_for)
            del engine
            release()
        both = {"ours": round(found[True], 1), "without_reuse": round(found[False], 1)}
        say("shared 2k prefix, requests/s", **both, times=round(found[True] / found[False], 2))

    def start(self) -> None:
        phases = start_seconds(self.folder)
        say("first token after start", seconds=phases["first token"], phases=phases)


def gpu_rows(wanted: list[str], with_peer: bool) -> None:
    rows = GpuRows(with_peer)
    made: dict[str, Callable[[], None]] = {
        **{f"batch{count}": functools.partial(rows.batch, count) for count in (1, 32, 256)},
        **{kind: functools.partial(rows.quantised, kind) for kind in ("int8", "int4", "fp8")},
        "deterministic": rows.deterministic,
        "prefill": rows.prefill,
        "structured": rows.structured,
        "prefix": rows.prefix,
        "start": rows.start,
    }
    for name in wanted:
        try:
            made[name]()
        except (ImportError, MissingDependencyError) as error:
            say(name, skipped=str(error))


START = """
import sys, time
def say(name): print(name, time.time(), flush=True)
import torch
say("import torch")
from piledriver.serve import SamplingParams
from piledriver.serve.offline import load_engine
say("import piledriver")
engine = load_engine(sys.argv[1], device=torch.device("cuda"), max_context=4096)
say("engine and weights")
engine.generate([list(range(100))], SamplingParams(max_tokens=1, temperature=0))
say("first token")
"""


def start_seconds(folder: str) -> dict[str, float]:
    """Return the seconds from starting Python to each phase, with empty compile caches; the last is the first token."""
    with tempfile.TemporaryDirectory() as caches:
        path = str(Path(__file__).resolve().parents[1] / "src")
        places = {"TRITON_CACHE_DIR": caches, "TORCHINDUCTOR_CACHE_DIR": caches, "PYTHONPATH": path}
        begin = time.time()
        done = subprocess.run(
            [sys.executable, "-c", START, folder],
            check=True,
            env={**os.environ, **places},
            timeout=120,
            stdout=subprocess.PIPE,
            text=True,
        )
    lines = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    return {name: round(float(when) - begin, 1) for name, when in lines}


def cpu_rows(with_peer: bool, new: int) -> None:
    """124M in fp32: one prompt, and 8 prompts of different lengths and answers of different lengths; then quantised."""
    config = preset("gpt2-124m", vocab_size=50304)
    model = fresh(config, "cpu", torch.float32)
    lengths = [16, 40, 64, 96, 128, 192, 256, 320]
    news = [new * (at + 1) // 8 for at in range(8)][::-1]
    one, ragged = prompts(config, 1, 64), [prompts(config, 1, length)[0] for length in lengths]
    asked = [greedy(max(count, 1)) for count in news]

    def speeds(model: Transformer) -> dict[str, float]:
        engine = Engine(model, max_context=1024, prefix_cache=False)
        first = new / timed(lambda: engine.generate(one, greedy(new)), 3, 1)
        return {
            "one prompt": first,
            "8 ragged prompts": sum(news) / timed(lambda: engine.generate(ragged, asked), 3, 1),
        }

    figures: dict[str, Any] = {"ours": speeds(model)}
    if with_peer:
        with tempfile.TemporaryDirectory() as folder:
            save_folder(model, folder)
            peer = load_peer(folder, model)
            longest = max(lengths)
            padded = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in ragged])
            mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in ragged])
            options = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
            row = torch.tensor(one)
            first = new / timed(lambda: peer.generate(row, attention_mask=torch.ones_like(row), **options), 3, 1)
            many = sum(news) / timed(lambda: peer.generate(padded, attention_mask=mask, **options), 3, 1)
            figures["peer"] = {"one prompt": first, "8 ragged prompts": many}
    threads = torch.get_num_threads()
    say("decode on CPU, 124M fp32", threads=threads, **figures)
    for kind in ("int8", "int4"):
        small = quantise_linears(copy.deepcopy(model), kind, head="int8")  # type: ignore[arg-type]
        dense = speeds(model)  # again, as near in time
        say(f"quantised decode on CPU, 124M {kind}", threads=threads, ours=speeds(small), dense=dense)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=ROWS, help=f"rows on a GPU in order, of {ROWS}")
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--new", type=int, default=64, help="new tokens on a CPU")
    args = parser.parse_args()
    if torch.cuda.is_available():
        gpu_rows(args.rows.split(","), not args.no_peer)
    else:
        cpu_rows(not args.no_peer, args.new)


if __name__ == "__main__":
    main()
