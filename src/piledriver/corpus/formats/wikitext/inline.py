"""Convert markup inside lines: bold and italic, external links, HTML tags, superscripts, behaviour switches."""

from __future__ import annotations

import re

from piledriver.corpus.formats.wikitext.marks import CELL, EQUALS, LINE_BREAK, VANISHED
from piledriver.corpus.text.data_table import word_set

_QUOTES = re.compile("'{2,}")
_LABELLED = re.compile(r"\[(?:https?:|ftps?:|mailto:|irc:|news:|gopher:)?//?[^\s\[\]<>\"]*[ \t]*([^\[\]\n]*)\]")
_MAIL = re.compile(r"\[mailto:[^\s\[\]]*[ \t]*([^\[\]\n]*)\]")
_BARE_START = re.compile(r"\[(?:https?:|ftps?:)//[^\s\[\]<>\"]*[ \t]?")
# Switches, and the tildes of a signature.
_SWITCH = re.compile(r"__[A-Z]{3,30}__|~{3,5}")
_SCRIPT = re.compile(r"<su([bp])(?:\s[^<>]*)?>([^<>]{0,60})</su[bp]\s*>", re.IGNORECASE)
_TAG = re.compile(r"</?([a-zA-Z][a-zA-Z0-9]*)\b[^<>]*>")
_SUPERSCRIPT = str.maketrans("0123456789+-=()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿ", "")
_SUBSCRIPT = str.maketrans("0123456789+-=()", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎", "")
_IS_SUPERSCRIPT = re.compile(r"[0-9+\-=()n]+")
_IS_SUBSCRIPT = re.compile(r"[0-9+\-=()]+")
_ORDINAL = re.compile(r"(?:st|nd|rd|th|er|re|e|ème|me|o|a|os|as|TM|SM|\W*)", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_HOLES = re.compile(f"{VANISHED}(?:[ \t\xa0;,]{{0,4}}{VANISHED})+")
_SEPARATORS = " \t\xa0;,"

_BREAKS = {"br": LINE_BREAK, "hr": "\n\n", "p": "\n\n", "div": "\n", "center": "\n", "blockquote": "\n\n"}
_BREAKS |= {"tr": "\n", "table": "\n\n", "td": CELL, "th": CELL, "caption": "\n", "ul": "\n", "ol": "\n", "dl": "\n"}
_BREAKS |= {"h1": "\n\n", "h2": "\n\n", "h3": "\n\n", "h4": "\n\n", "h5": "\n\n", "h6": "\n\n", "li": "\n* "}
_BREAKS |= {"dt": "\n", "dd": "\n", "section": "\n", "figure": "\n", "figcaption": "\n"}
_INLINE = word_set(
    """
    abbr b bdi bdo big cite code col colgroup data del dfn em font i ins kbd mark nobr noinclude onlyinclude q
    rb rp rt rtc ruby s samp small span strike strong sub sup tbody tfoot thead time translate tt tvar u var
    wbr html body nowiki ref references math a img gallery poem pre syntaxhighlight source includeonly
    """
)


def inline_to_text(text: str) -> str:
    """Return the text without markup inside lines; lines, lists and tables are unchanged.

    >>> inline_to_text("''x''<sup>2</sup> is [http://a.b a page] on H<sub>2</sub>O")
    'x² is a page on H₂O'
    """
    if EQUALS in text:
        text = text.replace(EQUALS, "=")
    if "''" in text:
        text = _QUOTES.sub(_apostrophes, text)
    if "//" in text:
        text = _LABELLED.sub(_label, text)
        text = _BARE_START.sub("", text)
    if "[mailto:" in text:
        text = _MAIL.sub(_label, text)
    if "__" in text or "~~~" in text:
        text = _SWITCH.sub("", text)
    if "<" in text:
        text = _SCRIPT.sub(script, text)
        text = _TAG.sub(_tag, text)
    if VANISHED in text:
        text = _without_holes(text)
    return text


def _apostrophes(found: re.Match[str]) -> str:
    count = found.end() - found.start()
    # Two, three and five are markup; four are an apostrophe and bold; more than five are apostrophes and both.
    return "'" if count == 4 else "'" * max(0, count - 5)


def _label(found: re.Match[str]) -> str:
    return found.group(1).strip() or VANISHED


def script(found: re.Match[str]) -> str:
    """Return `<sup>2</sup>` as a character where Unicode has it, else after `^` or `_`: 10⁶ must not become 106."""
    high, content = found.group(1).lower() == "p", found.group(2).strip()
    if high:
        if _IS_SUPERSCRIPT.fullmatch(content):
            return content.replace("−", "-").translate(_SUPERSCRIPT)
        if _ORDINAL.fullmatch(content):
            return content
    elif _IS_SUBSCRIPT.fullmatch(content):
        return content.translate(_SUBSCRIPT)
    if not content or VANISHED in content:
        return content
    shown = content if _WORD.fullmatch(content) else f"({content})"
    return ("^" if high else "_") + shown


def _tag(found: re.Match[str]) -> str:
    name = found.group(1).lower()
    if name in _BREAKS:
        if found.group()[1] == "/" and name in ("td", "th", "li", "br"):
            return LINE_BREAK if name == "br" else ""
        return _BREAKS[name]
    # An unknown tag is text: MediaWiki shows it as it is written.
    return "" if name in _INLINE else found.group()


def _without_holes(text: str) -> str:
    """Close the gaps of removed markup, with the brackets, commas and spaces that only it separated."""
    first, *pieces = _HOLES.sub(VANISHED, text).split(VANISHED)
    out = [first]
    for piece in pieces:
        before = out[-1].rstrip(_SEPARATORS)
        after = piece.lstrip(_SEPARATORS)
        opens, closes = before[-1:] == "(", after[:1] == ")"
        if opens and closes:
            before = before[:-1].rstrip(" ")
            after = after[1:]
            spaced = before and before[-1] != "\n" and after[:1] not in (" ", ",", ".", ";", ":", "\n", "")
            out[-1] = before + " " if spaced else before
            out.append(after)
        elif opens or closes:
            out[-1] = before
            out.append(after)
        elif after[:1] in _ENDS and len(piece) == len(after) and out[-1][-1:] in (" ", "\xa0"):
            out[-1] = out[-1].rstrip(" \xa0")
            out.append(piece)
        else:
            held = out[-1][len(before) :] + piece[: len(piece) - len(after)]
            mark = next((c for c in held if c in ",;"), "")
            # Commas on both sides of a gap become one.
            out[-1] = before
            out.append(
                (mark + (" " if len(held) > held.count(",") + held.count(";") else "") if mark else held) + after
            )
    return "".join(out)


_ENDS = (".", ",", ";", ":", "!", "?", ")")
