"""XML from strangers: no entity expansion, no external files, no network, bounded memory, records one by one."""

from __future__ import annotations

import html.entities
from collections.abc import Iterator
from typing import Any, BinaryIO

from lxml import etree

XmlError = etree.XMLSyntaxError


def parse(content: bytes) -> Any:
    """One whole XML document as an lxml tree root; entities stay nodes and are never expanded from a DTD."""
    return etree.fromstring(content, _parser())


def iterate(stream: BinaryIO, *tags: str) -> Iterator[Any]:
    """Each element with one of the tags (`{*}page` for any namespace), freed after it was used: constant memory."""
    context = etree.iterparse(
        stream,
        events=("end",),
        tag=tags,
        resolve_entities=False,
        load_dtd=False,
        no_network=True,
        huge_tree=True,
        recover=False,
    )
    for _, element in context:
        yield element
        element.clear()
        # Also what stands before it: cleared elements stay in the tree of their parent otherwise.
        while element.getprevious() is not None:
            del element.getparent()[0]


def entity_text(name: str) -> str:
    """The character of an HTML entity by its name, or nothing where it is unknown."""
    return html.entities.html5.get(f"{name};", "")


def _parser() -> Any:
    return etree.XMLParser(
        resolve_entities=False, load_dtd=False, no_network=True, huge_tree=False, remove_comments=True, remove_pis=True
    )
