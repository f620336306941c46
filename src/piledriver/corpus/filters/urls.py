"""Drop documents by block lists of domains and URLs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar
from urllib.parse import unquote, urlsplit

from piledriver.core import storage
from piledriver.corpus.document import Document
from piledriver.corpus.filters import Drop


@dataclass(frozen=True, kw_only=True)
class Urls:
    """Drop documents whose `url` in meta is on a block list.

    A domain blocks all of its subdomains. A URL blocks itself, whatever its scheme, fragment or trailing slash.

    A list has one entry a line; lines that begin with # are comments.
    """

    FILES: ClassVar[tuple[str, ...]] = ("domains", "urls")

    domains: str | None = None
    """A file of domains."""
    urls: str | None = None
    """A file of URLs."""
    keep_without_url: bool = True
    """Keep documents that have no `url` in their meta."""

    def __call__(self, document: Document) -> Document | Drop:
        """Judge one document."""
        url = document.meta.get("url")
        if not isinstance(url, str) or not url.strip():
            return document if self.keep_without_url else Drop("no url")
        host, normal = split_url(url)
        if self.domains is not None:
            blocked, _ = _blocked(self.domains)
            labels = host.split(".")
            for start in range(len(labels)):
                domain = ".".join(labels[start:])
                if domain in blocked:
                    return Drop("url: domain on the block list", domain)
        if self.urls is not None and normal in _blocked(self.urls)[1]:
            return Drop("url: on the block list", normal)
        return document


def split_url(url: str) -> tuple[str, str]:
    """Return (host, the URL in the form that is compared).

    >>> split_url("HTTPS://WWW.Example.com:443/a%20b/?q=1#top")
    ('example.com', 'example.com/a b/?q=1')
    """
    given = url.strip()
    try:
        parts = urlsplit(given if "://" in given else f"//{given}")
        host = (parts.hostname or "").rstrip(".").removeprefix("www.")
    except ValueError:
        # Brackets without an IPv6 address: not a host that a list could name.
        return "", given
    path = unquote(parts.path)
    query = f"?{parts.query}" if parts.query else ""
    return host, f"{host}{path if query else path.rstrip('/')}{query}"


@lru_cache(maxsize=4)
def _blocked(path: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the (hosts, URLs) of a list."""
    hosts, urls = zip(*map(split_url, read_list(path)), strict=True) if read_list(path) else ((), ())
    return frozenset(hosts), frozenset(urls)


def read_list(path: str) -> list[str]:
    """Return the entries of a list file."""
    lines = (line.strip() for line in storage.read_text(path).splitlines())
    return [line for line in lines if line and not line.startswith("#")]
