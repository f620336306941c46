"""What the original used for NIH ExPorter: pandas, white space collapsed, duplicates dropped by id and by text."""

from __future__ import annotations

import io

CASES = ["nih-exporter/PRJABS_sample_a.csv"]


def peer(content: bytes) -> str:
    import pandas

    table = pandas.read_csv(io.StringIO(content.decode(errors="ignore")))
    table = table[~table["ABSTRACT_TEXT"].isnull()]
    table["ABSTRACT_TEXT"] = table["ABSTRACT_TEXT"].astype(str).str.strip().str.split().str.join(" ")
    table = table.drop_duplicates(subset=["APPLICATION_ID"]).drop_duplicates(subset=["ABSTRACT_TEXT"])
    return "\n\n".join(table["ABSTRACT_TEXT"])
