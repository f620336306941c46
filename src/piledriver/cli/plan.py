"""`piledriver plan MODEL --hardware 64xh100-80g`: predict memory and time, choose a layout."""

from __future__ import annotations

import argparse
import re
from typing import Any

from piledriver.cli.options.counts import positive
from piledriver.cli.options.parser import Parser

EXAMPLE = "piledriver plan llama-3-8b --hardware 8xh100-80g"


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("model", nargs="?", help="training config (YAML), model folder with a config.json, or preset")
    parser.add_argument(
        "--hardware", default="here", metavar="HARDWARE", help="64xh100-80g, a YAML file, or here (default)"
    )
    parser.add_argument("--batch-tokens", type=positive, metavar="N", help="tokens of one step over all devices")
    parser.add_argument(
        "--length", type=positive, metavar="N", help="tokens of a sequence (default: the model's longest)"
    )
    parser.add_argument("--optimizer", metavar="KIND", help="adamw, adamw_split_bf16, adamw8bit, muon, lion, ...")
    parser.add_argument("--precisions", metavar="LIST", help="precisions to consider, such as bf16,fp8 (default: bf16)")
    parser.add_argument("--disk", metavar="FOLDER", help="a local disk that optimizer states may live on")
    parser.add_argument("--ds-config", metavar="FILE", help="fill in the open values of a DeepSpeed config")
    parser.add_argument("--budget-tokens", type=float, metavar="N", help="print days and price of this many tokens")
    parser.add_argument("--explain", metavar="LAYOUT", help="predict one layout, such as zero=3,tp=2,activations=full")
    parser.add_argument("--micro-batch", type=positive, metavar="N", help="with --explain: sequences of a micro-batch")
    parser.add_argument("--longest", action="store_true", help="with --explain: print the longest sequence that fits")
    parser.add_argument(
        "--inference", type=positive, metavar="REQUESTS", help="plan serving this many requests at once"
    )
    parser.add_argument(
        "--exact", action="store_true", help="check the chosen layout through the engine, on fake ranks"
    )
    parser.add_argument("--picture", metavar="FILE.png", help="draw memory by phase, and throughput against devices")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine's rates and keep them")
    parser.add_argument("--learn", nargs="+", metavar="RUN", help="refit rates to the measured steps of finished runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Print the plan."""
    import json

    if args.calibrate:
        _calibrate(args)
        return
    if args.learn:
        _learn(args)
        return
    if args.model is None:
        from piledriver.plan.errors import PlanError

        raise PlanError("no model was given", fix="name a config, a model folder or a preset (piledriver presets)")
    _check(args)
    given = _given(args)
    if args.inference:
        _inference(args, given)
        return
    if args.ds_config:
        _ds_config(args, given)
        return
    if args.explain is not None:
        _explain(args, given)
        return
    from piledriver.plan.entry import plan
    from piledriver.plan.report.table import plan_text

    made = plan(given.pop("model"), **given)
    if args.picture:
        from piledriver.plan.report.picture import save_picture

        save_picture(made, args.picture)
    if args.json:
        print(json.dumps(made.as_mapping(), indent=2))
        return
    print(plan_text(made, budget_tokens=args.budget_tokens))
    if args.exact:
        from piledriver.plan.exact import compare_with_engine

        print(compare_with_engine(made.best))
    if args.picture:
        print(f"\n{args.picture}")


def _check(args: argparse.Namespace) -> None:
    """Reject options that would have no effect, and a picture that could not be written, before the search."""
    from pathlib import Path

    from piledriver.core.errors import MissingFileError
    from piledriver.plan.errors import PlanError
    from piledriver.plan.report.picture import FORMATS

    for option in ("micro_batch", "longest"):
        if getattr(args, option) and args.explain is None:
            name = option.replace("_", "-")
            raise PlanError(
                f"--{name} is about one layout", fix=f"add --explain LAYOUT, such as --explain zero=3 --{name}"
            )
    if args.picture and Path(args.picture).suffix not in FORMATS:
        raise PlanError(
            f"--picture {args.picture} is not a picture", fix=f"end its name in one of {', '.join(FORMATS)}"
        )
    if args.picture and not Path(args.picture).absolute().parent.is_dir():
        raise MissingFileError(str(Path(args.picture).absolute().parent), fix="make the folder first")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `plan`: from the command line, then from the training config."""
    from piledriver.plan.search.candidates import Wishes

    found: dict[str, Any] = {"model": args.model, "hardware": args.hardware}
    if args.model.endswith((".yaml", ".yml")):
        found |= _of_config(args.model)
    batch_tokens = args.batch_tokens or found.pop("batch_tokens", None)
    found.pop("batch_tokens", None)
    if args.length:
        found["length"] = args.length
    if args.optimizer:
        found["optimizer"] = args.optimizer
    if args.precisions or args.disk:
        found["wishes"] = Wishes(precisions=tuple((args.precisions or "bf16").split(",")), disk=args.disk)
    if batch_tokens:
        from piledriver.plan.model_config import config_of

        length = found.get("length") or config_of(found["model"])[0].max_positions
        if batch_tokens < length:
            from piledriver.plan.errors import PlanError

            raise PlanError(
                f"{batch_tokens} tokens a step are less than a sequence of {length}",
                fix=f"give --batch-tokens {length} or more, or a shorter --length",
            )
        found["batch"] = batch_tokens // length
    return found


def _of_config(path: str) -> dict[str, Any]:
    from piledriver.core.config import load_config
    from piledriver.plan.model_config import config_of
    from piledriver.train.config import TrainConfig

    config = load_config(TrainConfig, path)
    return {
        "model": config.model,
        "length": config.data.seq_len or config_of(config.model)[0].max_positions,
        "batch_tokens": config.batch_tokens,
        "optimizer": config.optimizer.kind,
    }


def _explain(args: argparse.Namespace, given: dict[str, Any]) -> None:
    import json

    from piledriver.core.config import from_mapping
    from piledriver.engine.layout import Layout
    from piledriver.plan.entry import explain, longest_fitting_length
    from piledriver.plan.report.table import collective_lines, prediction_lines
    from piledriver.plan.result import prediction_mapping

    fields = _layout_fields(args.explain.strip())
    layout = from_mapping(Layout, {"precision": "auto", **fields}, "--explain")
    given.pop("wishes", None)
    if args.longest:
        optimizer = given.get("optimizer", "adamw")
        print(
            longest_fitting_length(
                given["model"], layout, args.hardware, optimizer=optimizer, sequences=args.micro_batch or 1
            )
        )
        return
    made = explain(given.pop("model"), layout, sequences=args.micro_batch, **given)
    if args.json:
        print(json.dumps(prediction_mapping(made), indent=2))
    else:
        print("\n".join((*prediction_lines(made), *collective_lines(made))))
        if not made.fits:
            from piledriver.plan.search.choose import reason_too_large

            print(f"does not fit: {reason_too_large(made)}")


def _layout_fields(text: str) -> dict[str, Any]:
    """Return the fields of a layout: zero=3,tp=2, the same in `Layout(...)`, or a mapping as the report prints it."""
    from piledriver.core.config.yaml_tree import parse_override
    from piledriver.plan.errors import PlanError

    fix = "write fields as zero=3,tp=2,activations=full"
    if text.startswith("{"):
        import yaml

        try:
            return dict(yaml.safe_load(text))
        except (yaml.YAMLError, ValueError) as error:
            raise PlanError(f"--explain: {text!r} is not a mapping", fix=fix) from error
    text = text.removeprefix("Layout(").removesuffix(")") if text.startswith("Layout(") else text
    # Not the commas of a list, such as stage_blocks=[3,5].
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]
    found: dict[str, Any] = {}
    for part in parts:
        if "=" not in part:
            raise PlanError(f"--explain: {part!r} has no value", fix=fix)
        name, value = parse_override(part)
        if name in found:
            raise PlanError(f"--explain: {name!r} is given twice", fix="give each field once")
        found[name] = value
    return found


def _ds_config(args: argparse.Namespace, given: dict[str, Any]) -> None:
    import json
    import sys

    from piledriver.compat.deepspeed.autotuning import autotune

    tuned = autotune(args.ds_config, given["model"], hardware=args.hardware, length=given.get("length"))
    print(json.dumps(tuned.config, indent=2))
    print(tuned.plan.why, file=sys.stderr)


def _inference(args: argparse.Namespace, given: dict[str, Any]) -> None:
    import json
    from dataclasses import asdict

    from piledriver.observe.memory import readable
    from piledriver.plan.inference import plan_inference
    from piledriver.plan.model_config import config_of

    length = given.get("length") or config_of(given["model"])[0].max_positions
    precision = (args.precisions or "bf16").split(",")[0]
    made = plan_inference(
        given["model"], batch=args.inference, length=length, hardware=args.hardware, precision=precision
    )
    if args.json:
        print(json.dumps({**asdict(made), "tokens_per_second": made.tokens_per_second}, indent=2))
        return
    print(
        f"{made.replicas} replicas of tp {made.tp}, {made.batch} requests of {length} tokens on each: "
        f"{made.tokens_per_second:,.0f} tokens/s, {1e3 * made.decode_seconds:.1f} ms a token, first token after "
        f"{1e3 * made.prefill_seconds:.0f} ms"
    )
    print(
        f"  memory of a device: weights {readable(made.weights)}, key-value cache {readable(made.cache)}, activations "
        f"{readable(made.activations)}; {made.longest_batch} requests would fit"
    )


def _calibrate(args: argparse.Namespace) -> None:
    import json

    from piledriver.plan.hardware.calibrate import calibrate

    path, rates = calibrate()
    print(
        json.dumps(rates, indent=2) if args.json else f"{path}\n" + "\n".join(f"  {k}: {v}" for k, v in rates.items())
    )


def _learn(args: argparse.Namespace) -> None:
    import json

    from piledriver.plan.learn import learn_from_runs

    found = learn_from_runs(args.learn)
    print(json.dumps(found, indent=2) if args.json else "\n".join(f"{name}: {value}" for name, value in found.items()))
