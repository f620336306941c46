"""`piledriver bench serve`: time to first token, inter-token latency and tokens/s of a running server."""

from __future__ import annotations

import argparse
import json

from piledriver.cli.options.counts import positive

EXAMPLE = "piledriver bench serve --url http://127.0.0.1:8000 --clients 64 --requests 500"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="server (default: port 8000)")
    parser.add_argument("--requests", type=positive, default=200, metavar="N", help="requests in all (default 200)")
    parser.add_argument("--clients", type=positive, default=16, metavar="N", help="closed loop: concurrent clients")
    parser.add_argument("--rate", type=float, metavar="R", help="open loop: requests per second, whatever is answered")
    parser.add_argument("--prompt-tokens", type=positive, default=128, metavar="N", help="tokens of a prompt")
    parser.add_argument("--answer-tokens", type=positive, default=128, metavar="N", help="tokens of an answer")
    parser.add_argument("--shared-prefix", type=float, default=0.0, metavar="S", help="share of the prompt in common")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of prompts and arrivals")
    parser.add_argument("--api-key", default="", metavar="KEY", help="key that the server asks for")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Send the load and print what clients saw."""
    from piledriver.serve.load import LoadConfig, run_load

    config = LoadConfig(
        requests=args.requests,
        clients=args.clients,
        rate=args.rate,
        prompt_tokens=args.prompt_tokens,
        answer_tokens=args.answer_tokens,
        shared_prefix=args.shared_prefix,
        seed=args.seed,
    )
    result = run_load(args.url, config, api_key=args.api_key)
    found = result.summary()
    if args.json:
        print(json.dumps(found))
        return 1 if result.errors else 0
    print(f"{found['requests']} requests in {found['seconds']} s, {found['errors']} errors")
    print(f"  {found['tokens_per_s']:>10} tokens/s   {found['requests_per_s']} requests/s")
    for name, title in (("first_token_ms", "first token"), ("between_tokens_ms", "between tokens")):
        times = "   ".join(f"{key} {value} ms" for key, value in found[name].items())
        print(f"  {title:<16} {times}")
    if result.errors:
        print(f"  first error: {result.errors[0]}")
    return 1 if result.errors else 0
