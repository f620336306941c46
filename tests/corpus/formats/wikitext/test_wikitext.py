"""The wikitext converter: one rule a test."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.formats.wikitext import Site, wikitext_to_text

RULES = {
    "bold and italic": ("'''''Both''''' ''it'' '''bold''' L''''art'''", "Both it bold L'art"),
    "link": ("[[Dog]]s and [[cat|felines]]", "Dogs and felines"),
    "link with parts": ("[[A|b|c]]", "b|c"),
    "file with nested link": ("[[File:A.jpg|thumb|A [[dog]] and {{x}}]]Text", "Text"),
    "category and language": ("Text [[Category:Dogs]][[fr:Chien]] [[:Category:Cats]]", "Text Category:Cats"),
    "sister project": ("[[wikt:dog]] [[wikt:cat|kitty]]", "dog kitty"),
    "external link": ("See [http://a.b the page] and [http://c.d] here.", "See the page and here."),
    "reference": ('A.<ref>x [[y]] {{z}}</ref> B.<ref name=q/> C <ref name="r">s</ref>.', "A. B. C."),
    "comment line": ("one\n<!-- hidden -->\ntwo", "one two"),
    "comment without end": ("one <!-- two", "one"),
    "nowiki": ("<nowiki>[[x]] ''y''</nowiki>", "[[x]] ''y''"),
    "math": ("If <math>x^{2}  {{y}}</math> then", "If $x^{2} {{y}}$ then"),
    "code": ('<syntaxhighlight lang="c">\nint a[[1]];\n  b;\n</syntaxhighlight>', "```c\nint a[[1]];\n  b;\n```"),
    "pre in one line": ("a <pre>b</pre>", "a b"),
    "superscript": ("10<sup>6</sup>, H<sub>2</sub>O, 1<sup>st</sup>, v<sub>max</sub>", "10⁶, H₂O, 1st, v_max"),
    "html": ("<div class=x>a<br />b</div><span>c</span> <canvas>", "a\nb c <canvas>"),
    "entities": ("a &amp; b&nbsp;&ndash; &lt;ref&gt;", "a & b\xa0– <ref>"),
    "unknown template": ("A {{Infobox|b=[[c]]\n|d={{e}}}}f", "A f"),
    "empty brackets go with what was in them": ("Bo ({{audio|x.ogg}}; {{foo}}) is", "Bo is"),
    "brackets with a rest": ("Bo ({{foo}}, born 1950) is", "Bo (born 1950) is"),
    "brackets that were empty stay": ("call f() now", "call f() now"),
    "words in templates": ("{{lang|fr|Été}} {{nowrap|a b}} {{convert|5|km|mi}} {{circa|1900}}", "Été a b 5 km c. 1900"),
    "date": ("{{birth date|1950|2|3|df=yes}} {{start date|1999|5}}", "3 February 1950 May 1999"),
    "pronunciation": ("{{IPAc-en|b|oʊ}}", "/boʊ/"),
    "equals sign in an argument": ("{{math|''E'' {{=}} ''m''}}", "E = m"),
    "sounds": ("[{{IPA|a}}] {{IPA|de|b}} {{IPA-fr|c|lang}} {{respell|EYEN|styne}}", "[a] [b] [c] EYEN-styne"),
    "songs": ("{{Track listing|title1=A|length1=3:20|title2=B}}", "1. A (3:20)\n2. B"),
    "nested template": ("{{nowrap|{{lang|de|{{nowrap|Tag}}}}}}", "Tag"),
    "parameter": ("{{{1|default}}}", "default"),
    "parser function": ("{{#if:x|yes|no}} {{lc:ABC}}", "yes abc"),
    "work": ("* {{cite book|last=Po|first=A|title=T|year=1900}}", "- Po, A (1900). T."),
    "list": ("* a\n** b\n# c\n# d\n: e", "- a\n  - b\n1. c\n2. d\n\ne"),
    "paragraphs": ("a\nb\n\nc", "a b\n\nc"),
    "heading": ("== A ==\ntext\n=== B ===\n== C ==\n==D==\nmore", "A\n\ntext\n\nD\n\nmore"),
    "switch": ("__NOTOC__ a", "a"),
    "rule": ("a\n----\nb", "a\n\nb"),
    "gallery": ("a <gallery>\nFile:x.jpg|y\n</gallery> b", "a b"),
    "poem": ("<poem>\none\ntwo\n</poem>", "one\ntwo"),
    "table": (
        '{| class="wikitable"\n|+ Title\n! A !! B\n|-\n| style="x" | 1 || [[two|2]]\n|-\n|\n|}',
        "Title\nA | B\n1 | 2",
    ),
    "nested table": ("{|\n|\n{|\n| a || b\n|-\n| c || d\n|}\n|}", "a | b\nc | d"),
    "table never closed": ("{|\n| a\n== B ==\ntext", "a\n\nB\n\ntext"),
    "html table": ("<table><tr><th>A</th><td>b</td></tr>\n<tr><td>c</td></tr></table>", "A | b\n\nc"),
    "link never closed": ("a [[b c\n\nd", "a b c\n\nd"),
    "template never closed": ("a {{b|c\n\nd", "a b|c\n\nd"),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    wikitext, text = RULES[rule]
    assert wikitext_to_text(wikitext) == text


def test_namespaces_of_the_wiki() -> None:
    site = Site(language="de", file_names=frozenset({"datei"}), category_names=frozenset({"kategorie"}))
    assert wikitext_to_text("a [[Datei:X.png|mini|b]] [[Kategorie:C]] [[en:D]]", site) == "a"


MARKUP = [
    "{{",
    "}}",
    "[[",
    "]]",
    "|",
    "{|",
    "|}",
    "|-",
    "<ref>",
    "</ref>",
    "<!--",
    "-->",
    "''",
    "=",
    "\n",
    "a ",
    "<math>",
]
MARKUP += [
    "</math>",
    "<nowiki>",
    "* ",
    "#",
    "{{{",
    "}}}",
    "[http://a ",
    "]",
    "<br>",
    "File:",
    "(",
    ")",
    ",",
    "&lt;",
    "\x02",
]


@given(st.lists(st.sampled_from(MARKUP), max_size=60).map("".join))
@settings(max_examples=200)
def test_any_markup_gives_text_without_marks_of_ours(wikitext: str) -> None:
    text = wikitext_to_text(wikitext)
    assert not set(text) & set("\x02\x0e\x0f\x10\x11")


@pytest.mark.parametrize(
    "opening", ["{{", "[[", "{|\n|", "<ref>", "<!--", "{{a|", "[[a|", "<math>", "[http://", "''", "(\x02", "<a "]
)
def test_hostile_nesting_comes_to_an_end(opening: str) -> None:
    # A quadratic converter would need hours for this and run into the time limit of the suite.
    assert "\x02" not in wikitext_to_text(opening * 200_000)


def test_pictures_by_the_names_of_other_wikis() -> None:
    text = "[[Datei:a.png|mini|Ein [[Bild]]]] Text. [[Lêer:b.jpg|thumb|links|Kaart]][[Kategorie:X]] [[Catégorie:Y]]Fin."
    assert wikitext_to_text(text) == "Text. Fin."


def test_authors_of_a_citation_in_vancouver_style() -> None:
    text = wikitext_to_text("* {{cite journal|vauthors=Smith A, Jones B|title=On Tea|year=2001}}")
    assert text == "- Smith A, Jones B (2001). On Tea."
