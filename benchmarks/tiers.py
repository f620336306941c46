"""Models larger than the device: loading, and forward passes with weights on the host or on disk, beside Accelerate.

    python benchmarks/tiers.py load            # any machine: a safetensors folder to host memory against a raw loop
    python benchmarks/tiers.py device          # a GPU with transformers: a safetensors file to the device
    python benchmarks/tiers.py host disk       # a GPU with transformers and accelerate
    python benchmarks/tiers.py compiled        # a GPU: compiled blocks stay compiled

The limits are measured in the same run: direct reads of the same files by as many threads, and copies from pinned host
memory to the device. Files are read past the page cache, or dropped from it before each pass of a reader that uses it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from piledriver.engine.offload.disk.direct_io import CHUNK_BYTES, THREADS
from piledriver.engine.offload.disk.host_buffer import HostBuffer
from piledriver.engine.offload.disk.opened_file import OpenedFile
from piledriver.serve.placement import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch

PCIE_GOAL = 55e9
os.environ.setdefault("TQDM_DISABLE", "1")


def raw_read_rate(files: list[Path], *, keep: bool = False) -> float:
    """Return bytes per second of direct reads of whole files, in chunks, by threads.

    With `keep` they go to new memory that holds them all, as loading must; else to a few buffers again and again.
    """
    buffers = [HostBuffer(CHUNK_BYTES, pin=False) for _ in range(THREADS)]
    opened = [(os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size) for path in files]
    chunks = [(file, at) for file, size in opened for at in range(0, size, CHUNK_BYTES)]
    begun = time.perf_counter()
    kept = HostBuffer(len(chunks) * CHUNK_BYTES, pin=False) if keep else None

    waiting = iter(list(enumerate(chunks)))

    def run(number: int) -> None:
        for place, (file, at) in waiting:
            view = buffers[number].view
            if kept is not None:
                view = kept.view[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES]
            os.preadv(file, [view], at)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, range(THREADS)))
    taken = time.perf_counter() - begun
    for file, _ in opened:
        os.close(file)
    return sum(size for _, size in opened) / taken


def drop_cache(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def layers(count: int, width: int) -> nn.Module:
    """Return layers of a linear stack, with the sizes of real weights."""
    return nn.Sequential(*(nn.Linear(width, width, bias=True) for _ in range(count)))


def touch_memory(nbytes: int) -> None:
    """Take memory from the system and give it back, so that what is measured next finds as much that is ready.

    A virtual machine gives free memory back to the machine under it, second by second; the first touch of what was
    given back is several times slower. So more is taken here than is needed next.
    """
    gc.collect()
    HostBuffer(nbytes, pin=False).bytes.fill_(0)


def load_row(gigabytes: float, rounds: int = 8) -> dict[str, Any]:
    """Return the row of loading to host memory: rounds of raw reads and of loading, in turns, after equal preparation.

    Both read the same bytes past the page cache, which holds none of them, into memory that was never touched before.
    """
    width = 2048
    count = max(1, round(gigabytes * 1e9 / (4 * width * width)))
    with tempfile.TemporaryDirectory(dir=os.environ.get("TIERS_DIR")) as name:
        folder = Path(name)
        names = [f"{i}.{leaf}" for i in range(count) for leaf in ("weight", "bias")]
        half = len(names) // 4 * 2
        model = layers(count, width).state_dict()
        last = model[f"{count - 1}.weight"].clone()
        weight_map = {}
        for number, part in enumerate((names[:half], names[half:]), 1):
            file = f"model-{number:05d}-of-00002.safetensors"
            save_file({key: model[key] for key in part}, folder / file)
            weight_map |= dict.fromkeys(part, file)
        del model
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        files = sorted(folder.glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)

        def load() -> float:
            with init_empty_weights():
                empty = layers(count, width)
            begun = time.perf_counter()
            loaded = load_checkpoint_and_dispatch(empty, folder, device_map={"": "cpu"})
            taken = time.perf_counter() - begun
            assert torch.equal(loaded[count - 1].weight, last)
            return size / taken

        sides = {"raw": lambda: raw_read_rate(files, keep=True), "ours": load}
        rates: dict[str, list[float]] = {side: [] for side in sides}
        processor: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(-1, rounds):  # the first one starts threads and imports modules
            for side in sides if number % 2 else reversed(sides):
                drop_cache(folder)
                touch_memory(2 * size)
                begun = time.process_time()
                rate = sides[side]()
                taken = time.process_time() - begun
                if number >= 0:
                    rates[side].append(rate)
                    processor[side].append(taken / (size / 1e9))
        # Files in the page cache, as after a download.
        for path in files:
            path.read_bytes()
        touch_memory(2 * size)
        cached = load()
    ratios = sorted(a / b for a, b in zip(rates["ours"], rates["raw"], strict=True))
    return {
        "row": "tiers load",
        "ours": round(statistics.median(rates["ours"]) / 1e9, 3),
        "limit": round(statistics.median(rates["raw"]) / 1e9, 3),
        "ratio_to_limit": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "processor_seconds_per_gb": {side: round(statistics.median(taken), 3) for side, taken in processor.items()},
        "from_page_cache": round(cached / 1e9, 3),
        "unit": "GB/s, safetensors folder to host memory; the limit reads the same bytes into new memory",
        "goal": "ratio_to_limit >= 0.9",
        "gigabytes": round(size / 1e9, 2),
    }


def make_llama(count: int, seed: int = 0) -> Any:
    """Return a Llama of transformers with blocks of the 8B shape, random weights, on the GPU in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=count,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        dtype=torch.bfloat16,
    )
    with init_empty_weights():
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(seed)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                value = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda")
                value.normal_(0, 0.02, generator=generator) if value.dim() > 1 else value.fill_(1)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = buffer.cuda()
    return model.eval()


def empty_llama(config: Any) -> Any:
    from transformers import LlamaForCausalLM

    with init_empty_weights():
        return LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False).eval()


def map_of(count: int, place: str) -> dict[str, Any]:
    ends = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), 0)
    return ends | {f"model.layers.{i}": place for i in range(count)}


@torch.no_grad()
def forward_seconds(run: Callable[[], Any], rounds: int, before: Callable[[], Any] | None = None) -> float:
    taken = []
    for _ in range(rounds):
        if before is not None:
            before()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def pinned_rate() -> float:
    host = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device="cuda")
    return host.nbytes / forward_seconds(lambda: target.copy_(host, non_blocking=True), 5)


def on_device(count: int, shapes: list[tuple[int, int]]) -> tuple[Any, dict[str, torch.Tensor], list[Any]]:
    """Return the config, the weights on the host, and (tokens, logits, seconds) of the undivided model."""
    model = make_llama(count)
    found = []
    for batch, length in shapes:
        tokens = torch.randint(32000, (batch, length), device="cuda")
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        seconds = forward_seconds(lambda tokens=tokens: model(tokens, use_cache=False), 3)
        found.append((tokens, logits, seconds))
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    return model.config, state, found


def host_rows(count: int) -> list[dict[str, Any]]:
    """Return rows of forward passes whose blocks wait in host memory."""
    import accelerate

    config, state, shapes = on_device(count, [(1, 64), (8, 4096)])
    torch.cuda.empty_cache()
    size = sum(value.nbytes for name, value in state.items() if ".layers." in name)
    rows = []
    print(f"# weights made: {size / 1e9:.2f} GB in blocks", flush=True)
    ours = empty_llama(config)
    ours.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    begun = time.perf_counter()
    dispatch_model(ours, map_of(count, "cpu"))
    print(f"# dispatched in {time.perf_counter() - begun:.1f} s", flush=True)
    peer = empty_llama(config)
    peer.load_state_dict(state, assign=True)
    accelerate.dispatch_model(peer, map_of(count, "cpu"))
    raw = pinned_rate()
    for tokens, logits, undivided in shapes:
        with torch.no_grad():
            equal = all(torch.equal(ours(tokens, use_cache=False).logits, logits) for _ in range(3))
            same = torch.equal(peer(tokens, use_cache=False).logits, logits)
        seconds = forward_seconds(lambda tokens=tokens: ours(tokens, use_cache=False), 7)
        theirs = forward_seconds(lambda tokens=tokens: peer(tokens, use_cache=False), 3)
        rows.append(
            {
                "row": f"tiers host {tokens.shape[0]}x{tokens.shape[1]}",
                "ours": round(seconds, 4),
                "peer": {"accelerate": round(theirs, 4)},
                "times_accelerate": round(theirs / seconds, 2),
                "undivided": round(undivided, 4),
                "ratio_to_limit": round(seconds / max(size / PCIE_GOAL, undivided), 3),
                "ratio_to_measured_link": round(seconds / max(size / raw, undivided), 3),
                "link_gb_s": round(raw / 1e9, 2),
                "bit_equal": equal,
                "peer_bit_equal": same,
                "gigabytes": round(size / 1e9, 2),
                "unit": "seconds per forward, blocks in host memory",
                "goal": "ratio_to_limit <= 1.08, times_accelerate >= 3",
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


@contextmanager
def recorded_reads() -> Iterator[list[tuple[float, float]]]:
    """Yield the start and end of each read of a file within the block."""
    spans: list[tuple[float, float]] = []
    read = OpenedFile.read

    def timed(self: OpenedFile, offset: int, into: memoryview, needed: int | None = None) -> None:
        begun = time.perf_counter()
        read(self, offset, into, needed)
        spans.append((begun, time.perf_counter()))

    OpenedFile.read = timed  # type: ignore[method-assign]
    try:
        yield spans
    finally:
        OpenedFile.read = read  # type: ignore[method-assign]


def device_row(count: int, rounds: int = 9) -> dict[str, Any]:
    """Return the row of loading to the device, with the milliseconds of a median round by part."""
    model = make_llama(count)
    config, state = model.config, {name: value.cpu() for name, value in model.state_dict().items()}
    del model
    loads, raws, parts = [], [], []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TIERS_DIR")) as name:
        folder = Path(name)
        files = [folder / "model.safetensors"]
        save_file(state, files[0], metadata={"format": "pt"})
        drop_cache(folder)
        total = files[0].stat().st_size
        raw_read_rate(files)
        for _ in range(rounds):
            # One after the other: the rate of a shared disk drifts within a second.
            raws.append(raw_read_rate(files))
            empty = empty_llama(config)
            torch.cuda.synchronize()
            with recorded_reads() as spans:
                begun = time.perf_counter()
                load_checkpoint_and_dispatch(empty, folder, device_map={"": 0})
                torch.cuda.synchronize()
                end = time.perf_counter()
            loads.append(total / (end - begun))
            first, last = min(start for start, _ in spans), max(stop for _, stop in spans)
            reading = sum(stop - start for start, stop in spans) / THREADS
            parts.append((first - begun, reading, last - first - reading, end - last))
        equal = all(torch.equal(value.cpu(), state[key]) for key, value in empty.state_dict().items())
    names = ("before the first read", "reads of a thread", "between reads", "after the last read")
    row = {
        "row": "tiers load to device",
        "ours": round(statistics.median(loads) / 1e9, 3),
        "limit": round(statistics.median(raws) / 1e9, 3),
        "ratio_to_limit": round(statistics.median(a / b for a, b in zip(loads, raws, strict=True)), 3),
        "rounds": [[round(a / 1e9, 2), round(b / 1e9, 2)] for a, b in zip(loads, raws, strict=True)],
        "milliseconds": {
            part: round(1e3 * statistics.median(taken), 1)
            for part, taken in zip(names, zip(*parts, strict=True), strict=True)
        },
        "bit_equal": equal,
        "gigabytes": round(total / 1e9, 2),
        "unit": "GB/s, safetensors file to the device, cold cache",
        "goal": "ratio_to_limit >= 0.9",
    }
    print(json.dumps(row), flush=True)
    return row


def disk_rows(count: int, *, with_peer: bool = True) -> list[dict[str, Any]]:
    """Return the row of forward passes whose blocks wait on disk."""
    config, state, shapes = on_device(count, [(1, 64)])
    tokens, logits, _ = shapes[0]
    size = sum(value.nbytes for name, value in state.items() if ".layers." in name)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TIERS_DIR")) as name:
        folder, other = Path(name) / "model", Path(name) / "accelerate"
        folder.mkdir()
        other.mkdir()
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        drop_cache(folder)
        files = [folder / "model.safetensors"]
        raw_read_rate(files)
        ours = load_checkpoint_and_dispatch(empty_llama(config), folder, device_map=map_of(count, "disk"))
        with torch.no_grad():
            equal = all(torch.equal(ours(tokens, use_cache=False).logits, logits) for _ in range(3))
        passes, raws = [], []
        for _ in range(3):
            raws.append(raw_read_rate(files))
            # The first pass finds blocks that were fetched before; each later one fetches as many for the next.
            forward_seconds(lambda: ours(tokens, use_cache=False), 1)
            passes.append(forward_seconds(lambda: [ours(tokens, use_cache=False) for _ in range(3)], 1) / 3)
        seconds, raw = statistics.median(passes), statistics.median(raws)
        ratio = statistics.median(size / a / b for a, b in zip(passes, raws, strict=True))
        print(f"# ours {size / seconds / 1e9:.2f} GB/s, {ratio:.3f} of raw, bit-equal {equal}", flush=True)
        theirs = None
        if with_peer:
            import accelerate

            peer = accelerate.load_checkpoint_and_dispatch(
                empty_llama(config), str(folder / "model.safetensors"), map_of(count, "disk"), offload_folder=str(other)
            )
            theirs = forward_seconds(
                lambda: peer(tokens, use_cache=False), 2, lambda: (drop_cache(other), drop_cache(folder))
            )
    row = {
        "row": "tiers disk",
        "ours": round(size / seconds / 1e9, 3),
        **({} if theirs is None else {"peer": {"accelerate": round(size / theirs / 1e9, 3)}}),
        "times_accelerate": None if theirs is None else round(theirs / seconds, 2),
        "limit": round(raw / 1e9, 3),
        "ratio_to_limit": round(ratio, 3),
        "bit_equal": equal,
        "gigabytes": round(size / 1e9, 2),
        "unit": "GB/s of weights on disk, forward passes, cold cache",
        "goal": "ratio_to_limit >= 0.85",
    }
    print(json.dumps(row), flush=True)
    return [row]


def compiled_row(count: int) -> dict[str, Any]:
    """Return the row of compiled blocks in host memory: as fast as eager ones, and compiled once."""
    from piledriver.engine.compile import compile_modules, compile_report
    from piledriver.models import ModelConfig, Transformer

    config = ModelConfig(vocab_size=32000, dim=4096, layers=count, heads=32, kv_heads=8, mlp_dim=14336)
    with torch.device("cuda"):
        model = Transformer(config).to(torch.bfloat16).requires_grad_(False).eval()
    tokens = torch.randint(32000, (1, 512), device="cuda")
    compile_modules(list(model.blocks.values()))
    with torch.no_grad():
        model(tokens)
        logits = model(tokens)
    undivided = forward_seconds(lambda: model(tokens), 3)
    before = compile_report()
    ends = {name: 0 for name, _ in model.named_children() if name != "blocks"}
    dispatch_model(model, ends | {"blocks": "cpu"})
    size = sum(p.numel() * 2 for p in model.blocks.parameters())
    with torch.no_grad():
        equal = all(torch.equal(model(tokens), logits) for _ in range(3))
    seconds = forward_seconds(lambda: model(tokens), 5)
    after = compile_report()
    row = {
        "row": "tiers compiled",
        "ours": round(seconds, 4),
        "undivided": round(undivided, 4),
        "ratio_to_limit": round(seconds / max(size / PCIE_GOAL, undivided), 3),
        "bit_equal": equal,
        "graphs": [before.graphs, after.graphs],
        "recompiles": sum(after.recompiles.values()),
        "breaks": sum(after.breaks.values()),
        "unit": "seconds per forward, compiled blocks in host memory",
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", choices=["load", "device", "host", "disk", "compiled"], default=["load"])
    parser.add_argument("--gigabytes", type=float, default=1.5, help="of the folder that is loaded")
    parser.add_argument("--rounds", type=int, default=8, help="of raw reads and of loading, in turns")
    parser.add_argument("--layers", type=int, default=16, help="blocks of 436 MB of the GPU rows")
    parser.add_argument("--without-peer", action="store_true", help="leave Accelerate out of the row of the disk")
    args = parser.parse_args()
    for what in args.what:
        if what == "load":
            print(json.dumps(load_row(args.gigabytes, args.rounds)), flush=True)
        elif what == "device":
            device_row(args.layers // 2)
        elif what == "host":
            host_rows(args.layers)
        elif what == "disk":
            disk_rows(args.layers // 2, with_peer=not args.without_peer)
        else:
            compiled_row(args.layers)


if __name__ == "__main__":
    main()
