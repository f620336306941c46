"""`piledriver evaluate lm-eval --model MODEL --tasks TASK,...`: run EleutherAI's evaluation harness."""

from __future__ import annotations

import argparse
import json

from piledriver.cli.options.counts import positive, zero_or_more

EXAMPLE = "piledriver evaluate lm-eval --model run/model --tasks lambada_openai,piqa --limit 100"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "--model", required=True, help="model folder with config.json and safetensors, of piledriver or transformers"
    )
    parser.add_argument("--tasks", required=True, metavar="TASK,...", help="tasks of the harness, or of --include")
    parser.add_argument("--include", metavar="DIR", help="folder with more task definitions")
    parser.add_argument("--tokenizer", help="tokenizer file or folder (default: the one in the model folder)")
    parser.add_argument("--length", type=positive, metavar="N", help="tokens per window (default: the model's longest)")
    parser.add_argument(
        "--few-shot", type=zero_or_more, metavar="N", help="examples before each question (default: the task's)"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N documents of each task")
    parser.add_argument(
        "--batch-tokens", type=positive, default=8192, metavar="N", help="tokens per forward pass (default 8192)"
    )
    parser.add_argument(
        "--no-boundary",
        action="store_true",
        help="no document boundary token before a context, as the harness's hf model",
    )
    parser.add_argument("--json", action="store_true", help="print the harness's results as JSON")


def run(args: argparse.Namespace) -> None:
    """Run the tasks, and print their metrics."""
    import os

    from piledriver.core.errors import MissingFileError
    from piledriver.evaluate.harness import model_class, run_tasks
    from piledriver.runtime import connect, detect_world, disconnect

    if args.include is not None and not os.path.isdir(args.include):
        raise MissingFileError(f"--include: folder {args.include}")
    world = detect_world()
    connect(world)
    model = model_class()(
        args.model,
        tokenizer=args.tokenizer,
        length=args.length,
        batch_tokens=args.batch_tokens,
        boundary=not args.no_boundary,
        device=str(world.device),
        world=world,
    )
    options = {"num_fewshot": args.few_shot, "limit": args.limit, "log_samples": False}
    results = run_tasks(model, args.tasks.split(","), include=args.include, **options)
    disconnect()
    if results is None:
        return
    if args.json:
        print(
            json.dumps(
                {"model": args.model, "results": results["results"], "n-samples": results["n-samples"]}, indent=2
            )
        )
        return
    width = max(len(task) for task in results["results"])
    for task, figures in results["results"].items():
        for name, value in figures.items():
            metric, _, filter_name = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = figures.get(f"{metric}_stderr,{filter_name}")
                spread = f" ± {error:.4f}" if isinstance(error, float) else ""
                print(f"{task:<{width}}  {metric:<16} {value:.4f}{spread}")
