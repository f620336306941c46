"""The report of a profile as one HTML page: tables, a flame view of the modules and a timeline of each rank.

The data stand in the page as JSON with every `<`, `>` and `&` escaped, and the script writes text nodes only, so that
no name of a module or operator can become markup. A content policy forbids everything that is not in the page.
"""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any


def report_page(title: str, values: dict[str, Any]) -> str:
    """Return the page of a report's JSON values."""
    template = resources.files("piledriver.observe.report").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(values, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return template.replace("{{TITLE}}", html.escape(title)).replace("{{DATA}}", data)
