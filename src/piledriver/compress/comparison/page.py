"""The report as one self-contained HTML page."""

from __future__ import annotations

import html
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2rem; } .note { color: #56697c; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #dde3ea; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.all td { font-weight: 600; }
.bar { display: inline-block; height: .7rem; background: #2f6f9f; vertical-align: middle; }
small { color: #56697c; } details { margin: .5rem 0; }
"""


def comparison_page(report: dict[str, Any]) -> str:
    """Return the page of a report of `compare_models`."""
    models = report["models"]
    names = ", ".join(html.escape(row["name"]) for row in models)
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>",
        f"<title>Compression of {html.escape(models[0]['name'])}</title><style>{_STYLE}</style>",
        "<h1>Compression report</h1>",
        f"<p class='note'>{names}; {report['documents']} documents of unseen text; {html.escape(report['device'])}</p>",
        "<h2>Size, quality, speed</h2>",
        "<p>Bits per byte: how many bits a byte of unseen text costs; lower is better. The change is against the first "
        "model, with the 95% interval of the paired differences of documents.</p>",
        _summary(models),
        "<h2>Bits per byte by source</h2>",
        _sources(models),
        "<h2>What was done</h2>",
        *_histories(models),
    ]
    return "".join(parts) + "\n"


def _summary(models: list[dict[str, Any]]) -> str:
    heads = ["model", "parameters", "size (MB)", "bits per byte", "95% interval", "change"]
    batches = list(models[0]["tokens_per_second"])
    rows = [[*heads, *(f"tokens/s, batch {batch}" for batch in batches)]]
    largest = max(row["bytes"] for row in models)
    for row in models:
        figure, change = row["bits_per_byte"]["all"], row["change"]
        bar = f"<span class='bar' style='width:{60 * row['bytes'] / largest:.0f}px'></span>"
        moved = ""
        if change is not None and change[0] is not None:
            moved = f"{100 * change[0]:+.3f}% <small>({100 * change[1]:+.3f} to {100 * change[2]:+.3f})</small>"
        rows.append(
            [
                html.escape(row["name"]),
                f"{row['parameters'] / 1e6:,.1f}M",
                f"{bar} {row['bytes'] / 1e6:,.2f}",
                _bits(figure["bits_per_byte"]),
                _interval(figure),
                moved,
                *(f"{row['tokens_per_second'].get(batch, 0):,.0f}" for batch in batches),
            ]
        )
    return _table(rows)


def _sources(models: list[dict[str, Any]]) -> str:
    rows = [["source", *(html.escape(row["name"]) for row in models)]]
    for source in models[0]["bits_per_byte"]:
        cells = []
        for row in models:
            figure = row["bits_per_byte"].get(source)
            cells.append(
                "" if figure is None else f"{_bits(figure['bits_per_byte'])} <small>{_interval(figure)}</small>"
            )
        rows.append([html.escape(source), *cells])
    return _table(rows, last_bold=True)


def _histories(models: list[dict[str, Any]]) -> list[str]:
    """Return what was done to each model; what it shares with an earlier one is told there."""
    parts = []
    for number, row in enumerate(models):
        records, name = row["records"], html.escape(row["name"])
        starts = [other for other in models[:number] if other["records"] == records[: len(other["records"])]]
        start = max(starts, key=lambda other: len(other["records"]), default=None)
        known = 0 if start is None else len(start["records"])
        parts.append(f"<h3>{name}</h3>")
        if known and start is not None:
            same = "the same as" if known == len(records) else "made from"
            parts.append(f"<p>{name} is {same} {html.escape(start['name'])}.</p>")
        elif not records:
            parts.append("<p>Nothing: the weights as they were trained.</p>")
        parts.extend(_record(record) for record in records[known:])
    return parts


def _record(record: dict[str, Any]) -> str:
    parts = [f"<p>{html.escape(_sentence(record))}</p>"]
    errors = record.get("relative_error") or record.get("zeros") or {}
    if errors:
        what = "share of zeros"
        if record.get("relative_error"):
            ends = any(isinstance(value, dict) for value in errors.values())
            what = "relative squared error of the output" + (", before → after" if ends else "")
        rows = [["layer", what], *([html.escape(layer), _error(value)] for layer, value in errors.items())]
        parts.append(f"<details><summary>{len(errors)} layers</summary>{_table(rows)}</details>")
    skipped = record.get("skipped") or {}
    if skipped:
        rows = [["skipped layer", "why"], *([html.escape(k), html.escape(str(v))] for k, v in skipped.items())]
        parts.append(f"<details open><summary>{len(skipped)} skipped</summary>{_table(rows)}</details>")
    return "".join(parts)


def _sentence(record: dict[str, Any]) -> str:
    """Return an act, its settings and its calibration text in words.

    >>> _sentence({"act": "quantise", "scheme": "w8a16", "method": "rtn", "calibration": None, "head": None})
    'Quantise: scheme w8a16, method rtn.'
    """
    hidden = ("act", "calibration", "relative_error", "skipped", "zeros", "layer_scores", "kept_channels")
    shown = {key: value for key, value in record.items() if key not in hidden and value not in (None, [], {})}
    shown = dict(sorted(shown.items(), key=lambda item: item[0] not in ("scheme", "method")))
    said = ", ".join(f"{key.replace('_', ' ')} {_setting(value)}" for key, value in shown.items())
    text = f"{str(record.get('act', 'unknown')).capitalize()}: {said}." if said else f"{record.get('act')}."
    origin = record.get("calibration") or {}
    if origin:
        text += f" Calibrated on {origin.get('samples')} windows"
        text += f" of {origin['length']} tokens" if "length" in origin else ""
        text += f" of {origin['tokens']}" if "tokens" in origin else ""
        text += (
            f" from window {origin['cursor']['index']} (seed {origin['cursor']['seed']})" if "cursor" in origin else ""
        )
        text += "."
    return text


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return " and ".join(f"{key} {size}" for key, size in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _error(value: Any) -> str:
    if isinstance(value, dict):
        return " → ".join(f"{part:.3g}" for part in value.values())
    return f"{value:.3g}"


def _bits(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _interval(figure: dict[str, Any]) -> str:
    return "" if figure["low"] is None else f"{figure['low']:.3f} to {figure['high']:.3f}"


def _table(rows: list[list[str]], *, last_bold: bool = False) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in rows[0])
    body = []
    for number, cells in enumerate(rows[1:], 1):
        style = " class='all'" if last_bold and number == len(rows) - 1 else ""
        body.append(f"<tr{style}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<div class='wide'><table><tr>{head}</tr>{''.join(body)}</table></div>"
