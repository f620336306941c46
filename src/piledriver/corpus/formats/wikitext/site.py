"""The names of a wiki's namespaces, and the prefixes of other wikis."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.corpus.text.data_table import data_table, word_set

ENGLISH_FILES = word_set("file image media")
ENGLISH_CATEGORIES = word_set("category")
_TABLES = data_table(__package__, "site.yaml")
LANGUAGES, SISTERS = word_set(_TABLES["languages"]), word_set(_TABLES["sisters"])


@dataclass(frozen=True, kw_only=True)
class Site:
    """One wiki, as the head of its dump describes it. The English names are valid in every wiki."""

    name: str = ""
    language: str = "en"
    url: str = ""
    """The part of a page's address before its title."""
    file_names: frozenset[str] = word_set(_TABLES["files"])
    category_names: frozenset[str] = word_set(_TABLES["categories"])
