"""The demo's report: one self-contained HTML file with embedded plots."""

from __future__ import annotations

import base64
import html
import io
from typing import Any

from piledriver.core import storage
from piledriver.demo.result import DemoResult
from piledriver.demo.samples import Sample
from piledriver.train.reporting.metrics import read_metrics
from piledriver.train.reporting.plots import loss_plot, validation_plot

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.2rem; } h3 { font-size: 1rem; margin: 1.4rem 0 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #dde3ea; }
th:first-child, td:first-child { text-align: left; }
tr.all td { font-weight: 600; }
td.best { background: #e6f2ea; }
img { max-width: 100%; } pre { background: #f4f6f8; padding: .8rem; overflow-x: auto; white-space: pre-wrap; }
pre { margin: .4rem 0; } pre b { color: #2f6f9f; } .note { color: #56697c; }
dt { font-weight: 600; float: left; clear: left; width: 10rem; } dd { margin: 0 0 .3rem 10.5rem; }
"""

_STAGES = {"extract": "found", "filter": "long enough", "exact": "no copies", "near": "no near copies"}
_COLUMNS = {
    "untrained": "The model before its first step: every token is as likely as any other. It is below 8 because its "
    "tokens are pieces of several bytes, which the tokenizer learned from the training text.",
    "byte frequencies": "A table of how often each byte occurs in the training text: the least that can be learned.",
    "zstd -22": "The compressor at its strongest, on all unseen text of the domain in one piece. It learns nothing "
    "beforehand, but finds again what an earlier document said; the models see each document alone.",
    "xz -9e": "Another compressor, in the same way.",
    "trained": "The model after training.",
}


def write_page(result: DemoResult, path: storage.Location) -> None:
    """Write the report of a demo."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>piledriver demo</title><style>{_STYLE}</style>",
        "<h1>From this machine's own files to a language model</h1>",
        f"<p class='note'>{_sentence(result)}</p>",
        "<h2>Bits per byte, by domain</h2>",
        "<p>How many bits each byte of unseen text costs: 8 is knowing nothing, lower is better. A model and a "
        "compressor can be compared because both are charged for every byte. The best of each row is green; the last "
        "row counts all bytes of all domains together.</p>",
        _table(result),
        _explained(result),
        _image(_bars(result), "bits per byte by domain"),
        "<h2>Training</h2>",
        "<p>The loss of every step: nats (1.44 bits) for each token of the batch. Below it, bits per byte as training "
        "went on, of text that is in neither the training nor the table: the beginnings of two documents of each "
        "domain, so the last points are near the table's last column and not equal to it.</p>",
        *(_image(figure, description) for description, figure in _curves(result).items()),
        "<h2>The corpus</h2>",
        "<p>How many documents there were, and how many were left after each stage: texts of less than 200 characters "
        "go first, then copies of the same text, then texts that are nearly the same. One in 25 of the rest is kept "
        "for the curves, two for the table; <code>piledriver corpus card corpus</code> says more.</p>",
        _corpus(result),
        "<h2>What it writes</h2>",
        "<p>The first words, in blue, are those of an unseen text of the domain. The model goes on from them, drawing "
        "each token from the 40 likeliest; in grey is what the text itself says there. After minutes on two cores it "
        "knows how words and lines of each domain look, and little of what they mean.</p>",
        *(part for sample in result.samples for part in _sample(sample)),
        "</html>",
    ]
    storage.write_text(path, "\n".join(parts))


def _sample(sample: Sample) -> list[str]:
    prompt, written, in_document = map(html.escape, (sample.prompt, sample.written, sample.in_document))
    return [
        f"<h3>{html.escape(sample.domain)}</h3>",
        f"<pre><b>{prompt}</b>{written}</pre><pre class='note'><b>{prompt}</b>{in_document}</pre>",
    ]


def _sentence(result: DemoResult) -> str:
    trained = result.summary
    rates = [row["tokens_per_second"] for row in read_metrics(trained.out)]
    documents = sum(entry["documents"] for entry in result.manifest.outputs if entry.get("split") == "train")
    return html.escape(
        f"{documents} documents in {len(result.domains)} domains; {trained.tokens:,} tokens in {trained.steps} steps "
        f"at {len(rates) / sum(1 / rate for rate in rates):,.0f} tokens/s; {sum(result.seconds.values()):.0f} s in all."
    )


def columns(result: DemoResult) -> dict[str, dict[str, float]]:
    """Return bits per byte as column -> domain -> value, in the order of the table."""
    return {
        "untrained": {name: row.bits_per_byte for name, row in result.before.items()},
        **result.baselines,
        "trained": {name: row.bits_per_byte for name, row in result.after.items()},
    }


def _table(result: DemoResult) -> str:
    shown = columns(result)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in shown)
    rows = []
    for domain in result.after:
        values = {name: column[domain] for name, column in shown.items()}
        best = min(values, key=lambda name: values[name])
        cells = "".join(f"<td class='{'best' if name == best else ''}'>{v:.3f}</td>" for name, v in values.items())
        rows.append(f"<tr class='{'all' if domain == 'all' else ''}'><td>{html.escape(domain)}</td>{cells}</tr>")
    return f"<table><tr><th>domain</th>{head}</tr>{''.join(rows)}</table>"


def _explained(result: DemoResult) -> str:
    terms = (f"<dt>{html.escape(name)}</dt><dd>{html.escape(_COLUMNS[name])}</dd>" for name in columns(result))
    return f"<dl>{''.join(terms)}</dl>"


def _corpus(result: DemoResult) -> str:
    rows = []
    stages = {stage["stage"]: stage["sources"] for stage in result.manifest.stages}
    for domain in result.domains:
        counts = [stages[stage].get(domain.name, {}).get("documents", 0) for stage in stages]
        cells = "".join(f"<td>{count}</td>" for count in counts)
        rows.append(f"<tr><td>{html.escape(domain.name)}</td>{cells}</tr>")
    head = "".join(f"<th>{html.escape(_STAGES.get(stage, f'after {stage}'))}</th>" for stage in stages)
    return f"<table><tr><th>documents</th>{head}</tr>{''.join(rows)}</table>"


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bars(result: DemoResult) -> Any:
    shown = columns(result)
    names = list(result.after)
    figure, axes = _figure(0.8 + 0.5 * len(names))
    colours = {
        "untrained": "#c9d2db",
        "byte frequencies": "#a8b5c2",
        "zstd -22": "#e2b866",
        "xz -9e": "#d08f3a",
        "trained": "#2f6f9f",
    }
    height = 0.8 / len(shown)
    for number, (column, values) in enumerate(shown.items()):
        places = [at + number * height for at in range(len(names))]
        axes.barh(places, [values[name] for name in names], height=height, label=column, color=colours.get(column))
    axes.set_yticks([at + 0.4 - height / 2 for at in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel("bits per byte (lower is better)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(shown), frameon=False)
    return figure


def _curves(result: DemoResult) -> dict[str, Any]:
    rows = read_metrics(result.summary.out)
    return {"loss by tokens": loss_plot(rows), "validation bits per byte by tokens": validation_plot(rows)}


def _image(figure: Any, description: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return f"<img alt='{html.escape(description)}' src='data:image/png;base64,{encoded}'>"
