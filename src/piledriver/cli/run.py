"""`piledriver run MODEL PROMPT`: answer a prompt with a model that may be larger than the device and the host."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from typing import Any

from piledriver.cli.options.counts import positive
from piledriver.cli.options.offload import add_memory

EXAMPLE = "piledriver run models/llama-70b Hello --max-tokens 20"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("model", help="model folder with config.json, safetensors and a tokenizer")
    parser.add_argument("prompt", help="text to continue")
    parser.add_argument("--tokenizer", help="tokenizer file or folder (default: the one in the model folder)")
    parser.add_argument("--max-tokens", type=positive, default=32, metavar="N", help="most new tokens (default 32)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the most likely token")
    parser.add_argument("--length", type=positive, metavar="N", help="tokens of prompt and answer to keep room for")
    add_memory(parser)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="dtype (default: as stored)")


def run(args: argparse.Namespace) -> None:
    """Print the device map, the predicted seconds a token, the answer and the measured seconds a token."""
    import torch

    from piledriver.data.tokenizer.open import open_tokenizer
    from piledriver.serve import SamplingParams
    from piledriver.serve.placement.maps.report import map_lines, rate_line
    from piledriver.serve.placement.maps.sizes import memory_limits
    from piledriver.serve.tiered_engine import open_tiered_engine

    tokenizer = open_tokenizer(args.tokenizer or args.model)
    engine, opened = open_tiered_engine(
        args.model,
        tokenizer=tokenizer,
        max_context=args.length or len(tokenizer.encode(args.prompt)) + 1 + args.max_tokens,
        max_memory=memory_limits(args.memory, args.device_memory),
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        scratch=args.scratch,
    )
    for line in map_lines(opened.plan, opened.rates):
        print(line)
    print(f"predicted {opened.plan.seconds:.3g} s a token", flush=True)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)
    print(args.prompt, end="", flush=True)
    moments = [time.perf_counter()]
    with warnings.catch_warnings():
        warnings.showwarning = _warn  # type: ignore[assignment]
        try:
            for event in engine.stream([*engine.boundary(), *engine.encode(args.prompt)], params):
                moments.append(time.perf_counter())
                print("".join(delta.text for delta in event.deltas), end="", flush=True)
        finally:
            # What is printed next, an error too, has a line of its own.
            print(flush=True)
    # The first token also reads the prompt.
    taken = moments[-1] - moments[1] if len(moments) > 2 else moments[-1] - moments[0]
    each = taken / max(len(moments) - 2, 1)
    print(f"measured {each:.3g} s a token, the first after {moments[1] - moments[0]:.3g} s")
    if opened.stream is not None:
        print(rate_line(opened.stream))


def _warn(message: Warning | str, *_: Any) -> None:
    """Print a warning (a disk that is slower than expected) on a line of its own, within the answer."""
    print(f"\npiledriver: warning: {message}", file=sys.stderr, flush=True)
