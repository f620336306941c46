"""Select the main content of a web page: the subtree with the best sum of prose minus boilerplate.

Every block of text has a weight: its length where it reads like prose, negative where it is mostly links or too short
to be a sentence. Weights are summed over subtrees; the element with the best sum is the content, without the parts in
it that are mostly links. Names of classes and roles exclude elements beforehand. The time is linear in the number of
elements.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from piledriver.corpus.text.data_table import word_set

_NEVER = word_set(
    "head script style template iframe object embed applet canvas audio video svg select datalist button textarea"
    " noscript noframes frameset map input nav menu dialog"
)
_SIDE = word_set("footer aside")
_CONTENT_TAGS = word_set("body article main html")
_HEADINGS = word_set("h1 h2 h3 h4 h5 h6")
_MAY_BE_SHORT = word_set("td th dt dd h1 h2 h3 h4 h5 h6 figcaption caption")
_CONTAINERS = word_set("div section ul ol dl table tbody form fieldset header center article")
_ENTRIES = word_set("li dd")
_ENTRY_LEVELS = 3
_TITLE_CHARACTERS = 30
_CARD_CHARACTERS = 400
_CERTAIN = 2.0
_NEARLY_ALL = 0.9
_INLINE = word_set(
    "a abbr acronym b bdi bdo big br cite code data del dfn em font i img ins kbd label mark math q rp rt ruby s samp"
    " small span strike strong sub sup time tt u var wbr"
)
_ROLES = word_set(
    "navigation banner complementary contentinfo menu menubar dialog alertdialog search toolbar tablist alert"
)
_BOILERPLATE = re.compile(
    r"(?:^|[\s_-])(?:ad|ads|adv|advert\w*|adsense|banner|bread-?crumbs?|byline-?social|cookies?|consent|dropdown|footer|footnav|foot|gdpr|global-?nav|hatnote|hidden|legal|login|masthead|"
    r"menu|meta-?nav|modal|nav|navbar|navbox|navigation|newsletter|noprint|outbrain|overlay|pager|pagination|paywall|"
    r"popup|print-?only|promo\w*|recirc\w*|recommend\w*|related\w*|rss|share|sharing|sharedaddy|"
    r"shoutbox|side-?bar|sidebar\w*|signup|sign-?up|skip-?link|social\w*|sponsor\w*|subscri\w*|taboola\w*|tag-?list|"
    r"tags|teaser\w*|toc|toolbar|tooltip|topbar|trending|widget\w*|most-?(?:read|popular)|popular-?\w*|more-?\w*stor\w*|"
    r"read-?more|see-?also|jump-?to-?nav|catlinks|printfooter|author-?(?:box|bio)|bio|jp-\w+|post-?nav\w*|"
    r"entry-?meta|post-?meta|article-?meta|skyscraper|infobox-?ad|trackbacks?|pingbacks?)(?:$|[\s_-])",
    re.IGNORECASE,
)
_COMMENTS = re.compile(
    r"(?:^|[\s_-])(?:comments?|comment-?(?:list|area|section|thread|s?-?wrap\w*|s?-?container)|commentlist|disqus\w*|replies|"
    r"respond|discussion|trackbacks?|pingbacks?)(?:$|[\s_-])",
    re.IGNORECASE,
)
# Only as a whole name: `article-footer` is a footer.
_CONTENT = re.compile(
    r"(?:^|\s)(?:article|(?:article|page|post|entry|main|story|blog)[-_]?(?:content|body|text|main|page|post)|content|body|"
    r"main|hentry|h-entry|post|story|text|prose|markdown-body)(?:$|\s)",
    re.IGNORECASE,
)


def main_content(body: Any, *, is_content: bool = False) -> tuple[Any, list[Any]]:
    """Return the element that holds the content, and the elements inside it that do not belong to it.

    `is_content` tells that `body` is the content; only the elements inside it are to be found.
    """
    # Pages spend most of their time in this loop: it skips the inside of excluded elements, counts inline elements for
    # the block around them, and calls nothing for white space, which is most of the text nodes.
    # An element's place is twice the number of its block, and one more inside a link.
    places = {body: 0}
    place_of = places.get
    elements, parents = [body], [-1]
    text, linked, stops = [0], [0], [0]
    suspect: list[float] = [0.0]
    headings: list[int] = []
    for element in body.iterdescendants():
        around = place_of(element.getparent())
        if around is None:
            continue
        tag = element.tag
        if tag in _INLINE:
            place = places[element] = around | 1 if tag == "a" else around
        else:
            index, limit = len(elements), 0.0
            place = 2 * index | around & 1
            if tag in _NEVER and not (tag == "script" and (element.get("type") or "").startswith("math/tex")):
                limit = _CERTAIN
            elif tag not in _CONTENT_TAGS:
                limit = _suspicion(element, tag)
                if tag in _HEADINGS:
                    headings.append(index)
            elements.append(element)
            parents.append(around >> 1)
            text.append(0)
            linked.append(0)
            stops.append(0)
            suspect.append(limit)
            if limit < _CERTAIN:
                places[element] = place
            else:
                place = -1
        if place >= 0 and (found := element.text) and (found := found.strip()):
            _count(found, place, text, linked, stops)
        if (found := element.tail) and (found := found.strip()):
            _count(found, around, text, linked, stops)
    count = len(elements)
    cards = [0] * count
    for index in headings:
        if text[index] and linked[index] > 0.8 * text[index]:
            cards[index] = 1
    weights = [_weight(elements[i].tag, text[i], linked[i], stops[i]) if text[i] else 0.0 for i in range(count)]
    dropped = _dropped(parents, weights, suspect, cards)
    if is_content:
        return body, _outermost(elements, parents, dropped)
    return _best(elements, parents, text, linked, weights, dropped)


def _outermost(elements: list[Any], parents: list[int], dropped: list[bool]) -> list[Any]:
    return [elements[index] for index in range(1, len(elements)) if dropped[index] and not dropped[parents[index]]]


def _dropped(parents: list[int], weights: list[float], suspect: list[float], cards: list[int]) -> list[bool]:
    """Return the elements excluded by names and roles, and lists of teasers, unless they hold most of the prose."""
    prose = [weight if weight > 0 else 0.0 for weight in weights]
    for index in range(len(parents) - 1, 0, -1):
        prose[parents[index]] += prose[index]
        cards[parents[index]] += cards[index]
    dropped = [False] * len(parents)
    for index in range(1, len(parents)):
        limit = suspect[index]
        if limit < 0.5 and cards[index] >= 3 and prose[index] < _CARD_CHARACTERS * cards[index]:
            limit = 0.5
        dropped[index] = dropped[parents[index]] or (limit > 0 and prose[index] <= limit * prose[0])
    return dropped


def _count(found: str, place: int, text: list[int], linked: list[int], stops: list[int]) -> None:
    length, block = len(found), place >> 1
    text[block] += length
    if place & 1:
        linked[block] += length
    elif length > 20:
        stops[block] += found.count(",") + found.count(". ") + (found[-1] in ".!?")
        if not found.isascii():
            stops[block] += found.count("。") + found.count("、")


def _best(
    elements: list[Any],
    parents: list[int],
    text: list[int],
    linked: list[int],
    weights: list[float],
    dropped: list[bool],
) -> tuple[Any, list[Any]]:
    count = len(elements)
    sums = [0.0 if gone else weight for weight, gone in zip(weights, dropped, strict=True)]
    for index in range(count - 1, 0, -1):
        if not dropped[index]:
            parent = parents[index]
            sums[parent] += sums[index]
            text[parent] += text[index]
            linked[parent] += linked[index]
    # Of equal sums the last, which is the tightest.
    best = 0
    for index, total in enumerate(sums):
        if total >= sums[best] and not dropped[index]:
            best = index
    if sums[best] <= 0:
        # Without prose (a list, a form) everything is content, except what names and roles exclude.
        return elements[0], _outermost(elements, parents, dropped)
    # A notice far from the text makes their common ancestor slightly better: take the tightest with nearly the sum.
    for index in range(best + 1, count):
        if not dropped[index] and sums[index] >= _NEARLY_ALL * sums[best] and parents[index] >= best:
            best = index
    unwanted = [
        elements[index]
        for index in range(best + 1, count)
        if (dropped[index] and not dropped[parents[index]])
        or (
            sums[index] < 0
            and linked[index] > 0.8 * text[index]
            and elements[index].tag in _CONTAINERS
            and not _is_title(index, elements, parents, text, linked)
        )
    ]
    return elements[best], unwanted


def _is_title(index: int, elements: list[Any], parents: list[int], text: list[int], linked: list[int]) -> bool:
    """Return whether a block that is only a link is the title of a longer entry, as in a list of publications."""
    if text[index] < _TITLE_CHARACTERS or len(elements[index]) != 1:
        return False
    for _ in range(_ENTRY_LEVELS):
        index = parents[index]
        if elements[index].tag in _ENTRIES:
            return linked[index] < 0.7 * text[index]
    return False


def _weight(tag: str, length: int, linked: int, stops: int) -> float:
    plain = length - linked
    if linked > 0.5 * length:
        return 0.5 * plain if stops and plain > 80 else -10.0 - 0.5 * min(length, 200)
    if tag == "pre":
        return float(length)
    if plain < 30 and not stops:
        return 0.0 if tag in _MAY_BE_SHORT else -5.0
    return plain * min(1.0, 0.3 + 0.35 * stops) - linked


def _suspicion(element: Any, tag: str) -> float:
    """Return the share of the page's prose up to which an element is boilerplate."""
    found = 0.4 if tag in _SIDE else 0.0
    attribute = element.get
    if attribute("role") in _ROLES:
        return 0.4
    name = attribute("class")
    if name:
        found = max(found, _suspicious_name(name))
    name = attribute("id")
    if name and tag != "section" and tag not in _HEADINGS:
        found = max(found, _suspicious_name(name))
    return found


@functools.lru_cache(1 << 16)
def _suspicious_name(name: str) -> float:
    if len(name) > 500:
        return 0.0
    # A name of many words is the slug of a title, which may hold any word.
    name = " ".join(token for token in name.split() if token.count("-") + token.count("_") < 4)
    if _CONTENT.search(name):
        return 0.0
    return 0.75 if _COMMENTS.search(name) else 0.4 if _BOILERPLATE.search(name) else 0.0
