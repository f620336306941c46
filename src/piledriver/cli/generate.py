"""`piledriver generate MODEL PROMPT...`: continue prompts with a model."""

from __future__ import annotations

import argparse
import json
import sys

from piledriver.cli.options.counts import positive, zero_or_more
from piledriver.cli.options.offload import add_offload, check_offload

EXAMPLE = 'piledriver generate run/model "The quick brown" --max-tokens 40 --temperature 0.7'


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("model", help="model folder with config.json, safetensors and a tokenizer")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue (default: one, from stdin)")
    parser.add_argument("--tokenizer", help="tokenizer file or folder (default: the one in the model folder)")
    parser.add_argument("--max-tokens", type=positive, default=64, metavar="N", help="most new tokens (default 64)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the most likely token (default 0.8)"
    )
    parser.add_argument("--top-k", type=zero_or_more, default=0, metavar="K", help="sample among K tokens (0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample among the likeliest of mass P")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the likeliest")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="over 1 avoids repetition")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text (repeatable)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers (default 0)")
    parser.add_argument("-n", type=positive, default=1, help="answers for each prompt (default 1)")
    parser.add_argument(
        "--no-boundary", action="store_true", help="no document boundary token before a prompt, which training has"
    )
    parser.add_argument("--deterministic", action="store_true", help="answers do not depend on what else is computed")
    parser.add_argument("--quantise", choices=["int8", "int4", "fp8"], help="round the linear layers' weights")
    parser.add_argument("--kv-dtype", choices=["auto", "fp8", "int8"], default="auto", help="dtype of the KV cache")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="dtype (default: as stored)")
    parser.add_argument("--device", help="device (default: the accelerator, else the CPU)")
    add_offload(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON line for each prompt, with log-probabilities")


def run(args: argparse.Namespace) -> None:
    """Print each prompt's answer as it is decoded, or JSON lines."""
    import torch

    from piledriver.data.tokenizer.open import open_tokenizer
    from piledriver.serve import SamplingParams, open_engine

    check_offload(args, quantise=args.quantise is not None, device=args.device is not None)
    prompts = args.prompts or [sys.stdin.read()]
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        stop=tuple(args.stop),
        seed=args.seed,
        n=args.n,
        logprobs=0 if args.json else None,
    )
    tokenizer = None if args.tokenizer is None else open_tokenizer(args.tokenizer)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    if args.offload:
        from piledriver.serve.placement.maps.sizes import memory_limits
        from piledriver.serve.tiered_engine import open_tiered_engine

        tokenizer = tokenizer or open_tokenizer(args.model)
        longest = max(len(tokenizer.encode(prompt)) for prompt in prompts) + 1 + args.max_tokens
        engine, _ = open_tiered_engine(
            args.model,
            tokenizer=tokenizer,
            dtype=dtype,
            max_memory=memory_limits(args.memory, args.device_memory),
            scratch=args.scratch,
            max_context=longest,
            max_sequences=len(prompts) * args.n,
            deterministic=args.deterministic,
            kv_dtype=args.kv_dtype,
        )
    else:
        engine = open_engine(
            args.model,
            tokenizer=tokenizer,
            device=args.device,
            dtype=dtype,
            quantise=args.quantise,
            deterministic=args.deterministic,
            kv_dtype=args.kv_dtype,
        )
    start = [] if args.no_boundary else engine.boundary()
    encoded = [[*start, *engine.encode(prompt)] for prompt in prompts]
    if args.json:
        for prompt, output in zip(prompts, engine.generate(encoded, params), strict=True):
            answers = [
                {
                    "text": completion.text,
                    "tokens": completion.token_ids,
                    "logprobs": [entry.logprob for entry in completion.logprobs or []],
                    "finish_reason": completion.finish_reason,
                }
                for completion in output.completions
            ]
            print(json.dumps({"prompt": prompt, "answers": answers}))
        return
    if len(prompts) == 1 and args.n == 1:
        print(prompts[0], end="", flush=True)
        for event in engine.stream(encoded[0], params):
            print("".join(delta.text for delta in event.deltas), end="", flush=True)
        print()
        return
    for prompt, output in zip(prompts, engine.generate(encoded, params), strict=True):
        for completion in output.completions:
            print(f"{prompt}{completion.text}\n")
