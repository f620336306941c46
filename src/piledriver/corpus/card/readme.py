"""The card as README.md: a YAML header that the Hugging Face Hub accepts, then the facts in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml

from piledriver.corpus.card.facts import CardFacts

# Our names of licences to the Hub's.
_CALLED = {"odc-by-1.0": "odc-by", "odbl-1.0": "odbl", "pddl-1.0": "pddl", "gfdl-1.3": "gfdl"}
# Obsolete codes of the detector to current ISO codes.
_LANGUAGES = {"iw": "he", "jw": "jv", "mo": "ro", "in": "id", "ji": "yi"}
# Languages of a smaller share of the documents are as likely errors of the detector.
_LANGUAGE_SHARE = 0.01
_SIZES = (("n<1K", 10**3), ("1K<n<10K", 10**4), ("10K<n<100K", 10**5), ("100K<n<1M", 10**6), ("1M<n<10M", 10**7))
_MORE_SIZES = (("10M<n<100M", 10**8), ("100M<n<1B", 10**9), ("1B<n<10B", 10**10), ("10B<n<100B", 10**11))


def card_header(facts: CardFacts) -> dict[str, Any]:
    """Return the metadata: languages, licences, size, and the files of each split."""
    licences = sorted({hub_licence(licence) for licence in facts.licences}) or ["other"]
    least = _LANGUAGE_SHARE * sum(facts.languages.values())
    codes = [_LANGUAGES.get(code, code) for code, count in facts.languages.most_common() if count >= least]
    languages = list(dict.fromkeys(code for code in codes if re.fullmatch("[a-z]{2,3}", code)))
    documents = sum(facts.splits.values())
    made: dict[str, Any] = {"pretty_name": facts.manifest.name}
    if languages:
        made["language"] = languages
    made["license"] = licences if len(licences) > 1 else licences[0]
    if "other" in licences:
        # The Hub requires a name and a link: the section below lists the licences.
        made["license_name"], made["license_link"] = "per-document", "README.md"
    made["task_categories"] = ["text-generation"]
    made["size_categories"] = [size_category(documents)]
    files = [{"split": split, "path": f"{split}/*.jsonl.zst"} for split, count in facts.splits.items() if count]
    made["configs"] = [{"config_name": "default", "data_files": files}]
    return made


def hub_licence(licence: str) -> str:
    """Return the Hub's name of a licence.

    >>> hub_licence("CC-BY-4.0"), hub_licence("public-domain"), hub_licence("yours")
    ('cc-by-4.0', 'other', 'other')
    """
    # Our names are SPDX identifiers, which have "or-later" and "only" where the Hub's do not.
    name = re.sub(r"(?:-or-later|-only|\+)$", "", "-".join(licence.lower().split()))
    name = _CALLED.get(name, name)
    return name if name in _hub_licences() else "other"


@cache
def _hub_licences() -> frozenset[str]:
    """Return the names that the Hub accepts."""
    lines = (resources.files("piledriver.corpus.card") / "hub_licences.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


def size_category(documents: int) -> str:
    """Return the Hub's size category of a number of rows."""
    return next((name for name, limit in (*_SIZES, *_MORE_SIZES) if documents < limit), "100B<n<1T")


def card_readme(facts: CardFacts) -> str:
    """Return the file."""
    manifest = facts.manifest
    parts = [
        f"---\n{yaml.safe_dump(card_header(facts), sort_keys=False, allow_unicode=True)}---",
        f"# {_plain(manifest.name)}",
        f"Built by piledriver {manifest.versions.get('piledriver', '')} from {len(manifest.inputs)} raw files; "
        "`manifest.json` has their checksums, the recipe and the counts of every stage; `ledger.parquet` every dropped "
        "document and the reason; `card.html` samples and charts.",
        "Each line is a JSON object: `text`, and `meta` with `pile_set_name` (the source), `id`, `licence`, `origin`.",
        "## Composition",
        _table(
            ("source", "found", "kept", "bytes of text", "bytes in training"),
            [
                (name, part.extracted, part.documents, part.text_bytes, part.train_bytes)
                for name, part in facts.composition.items()
            ],
        ),
        "## Splits",
        _table(("split", "documents"), facts.splits.items()),
        "## Licences",
        'By the licence of each document; "yours" and "unknown" do not permit publication.',
        _table(("licence", "documents"), facts.licences.items()),
        "## Dropped documents",
        _table(("stage", "reason", "documents"), [(*key, count) for key, count in facts.drops.items()]),
    ]
    if facts.taken_out:
        rows = [(stage, name, count) for stage, counts in facts.taken_out.items() for name, count in counts.items()]
        parts += ["## Removed from documents", _table(("stage", "what", "number"), rows)]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_cell(value) for value in row)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else _plain(str(value))


def _plain(text: str) -> str:
    """Escape text for Markdown and HTML."""
    escaped = re.sub(r"([\\`*_{}\[\]()#+!|<>~])", r"\\\1", text)
    return " ".join(escaped.split())
