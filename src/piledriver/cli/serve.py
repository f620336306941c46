"""`piledriver serve MODEL`: an OpenAI-compatible server, with a page for the browser."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from piledriver.cli.options.counts import positive
from piledriver.cli.options.offload import add_offload, check_offload

EXAMPLE = "piledriver serve runs/tiny/model --port 8000"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("model", metavar="MODEL", help="model folder: config.json, safetensors and a tokenizer")
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen at (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="port; 0 for any free one (default 8000)")
    parser.add_argument("--name", default="", metavar="NAME", help="model name for clients (default: the folder's)")
    parser.add_argument("--api-key-file", metavar="FILE", help="file with the key that every request must send")
    parser.add_argument("--chat-template", default="", metavar="FILE", help="Jinja file instead of the model's own")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights (default: theirs)"
    )
    parser.add_argument("--deterministic", action="store_true", help="answers do not depend on other requests")
    parser.add_argument(
        "--max-context", type=positive, default=0, metavar="N", help="longest prompt and answer together"
    )
    parser.add_argument(
        "--max-sequences", type=positive, metavar="N", help="most answers at once (default 256; 4 with --offload)"
    )
    parser.add_argument("--cache-tokens", type=positive, default=0, metavar="N", help="tokens in the KV cache")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8", "int8"), default="auto", help="dtype of the KV cache")
    parser.add_argument(
        "--tp", type=positive, default=1, metavar="N", help="processes, each with its device, that share every matrix"
    )
    add_offload(parser)
    parser.add_argument("--speculate", choices=("none", "ngram"), default="none", help="guess tokens ahead by n-grams")
    parser.add_argument(
        "--max-queue", type=positive, default=1024, metavar="N", help="most open requests (default 1024)"
    )
    parser.add_argument("--drain-seconds", type=int, default=30, metavar="S", help="time to finish after SIGTERM")
    parser.add_argument("--ignore-unknown-fields", action="store_true", help="ignore fields that are not known")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    from piledriver.core.errors import MissingFileError, UsageError
    from piledriver.runtime import environment
    from piledriver.serve.execution.tensor_parallel.processes import end_with_parent, start_ranks
    from piledriver.serve.front_end import FrontEnd
    from piledriver.serve.http.config import ServerConfig
    from piledriver.serve.http.server import open_socket

    check_offload(args, tp=args.tp > 1)
    if not Path(args.model).is_dir():
        raise MissingFileError(args.model, fix="give a model folder, such as RUN/model")
    key = ""
    if args.api_key_file:
        if not Path(args.api_key_file).exists():
            raise MissingFileError(args.api_key_file)
        key = Path(args.api_key_file).read_text("utf-8").strip()
        if not key:
            raise UsageError(f"{args.api_key_file} is empty", fix="write the key into it")
    config = ServerConfig(
        host=args.host,
        port=args.port,
        model_name=args.name,
        api_key=key,
        max_queue=args.max_queue,
        ignore_unknown_fields=args.ignore_unknown_fields,
        chat_template=args.chat_template,
        drain_seconds=args.drain_seconds,
    )
    rank = environment.snapshot().get("RANK") if args.tp > 1 else None
    # Before torch is imported: a taken port is an error at once.
    listener = open_socket(config) if rank in (None, "0") else None
    front_end = FrontEnd(listener, args.model, config) if listener is not None else None
    started = start_ranks(args.tp, sys.argv[1:]) if args.tp > 1 and rank is None else []
    try:
        import torch

        from piledriver.engine import Layout
        from piledriver.runtime import connect, detect_world
        from piledriver.serve.offline import open_engine

        if args.tp > 1:
            end_with_parent()
            world = detect_world()
            connect(world)
        settings: dict[str, Any] = {
            "dtype": getattr(torch, args.dtype) if args.dtype else None,
            "deterministic": args.deterministic,
            "kv_dtype": args.kv_dtype,
            "speculate": args.speculate,
        }
        if args.offload:
            from piledriver.serve.placement.maps.report import map_lines
            from piledriver.serve.placement.maps.sizes import memory_limits
            from piledriver.serve.tiered_engine import open_tiered_engine

            settings |= {"cache_tokens": args.cache_tokens} if args.cache_tokens else {}
            engine, opened = open_tiered_engine(
                args.model,
                max_memory=memory_limits(args.memory, args.device_memory),
                scratch=args.scratch,
                max_context=args.max_context or 2048,
                max_sequences=args.max_sequences or 4,
                **settings,
            )
            print("\n".join(map_lines(opened.plan, opened.rates)), file=sys.stderr, flush=True)
        else:
            engine = open_engine(
                args.model,
                device=world.device if args.tp > 1 else None,
                layout=Layout(tp=args.tp),
                max_context=args.max_context,
                max_sequences=args.max_sequences or 256,
                cache_tokens=args.cache_tokens,
                **settings,
            )
        if front_end is None:
            engine.follow()
            return 0
    except BaseException:
        for process in started:
            process.kill()
        if front_end is not None:
            front_end.kill()
        raise
    name = args.name or Path(args.model).resolve().name
    status = front_end.serve(engine, on_ready=lambda url: _announce(url, name, bool(key)))
    for process in started:
        process.wait()
    return status


def _announce(url: str, name: str, guarded: bool) -> None:
    header = " -H 'Authorization: Bearer KEY'" if guarded else ""
    # One write: a program that starts the server may close the pipe after the first line.
    sys.stdout.write(
        f"{name}: {url} (page), {url}/v1 (OpenAI API)\n"
        f"  curl {url}/v1/completions{header} -H 'Content-Type: application/json' "
        f'-d \'{{"prompt": "Once", "max_tokens": 32}}\'\n'
    )
    sys.stdout.flush()
