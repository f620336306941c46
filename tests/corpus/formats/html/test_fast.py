"""The compiled scanner and the tree return the same text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.formats.html.convert import fragment_to_text
from piledriver.corpus.formats.html.fast.cache_key import checksum_of_files
from piledriver.corpus.formats.html.fast.convert import scan_to_text

words = st.sampled_from(
    [
        *("one", " two ", "x &lt; y", "&amp;lt;", "a\n  b", "&nbsp;", "", " ", "é", "&eacute;", "3 > 2", "#", "\xa0"),
        *("&#8212;", "&#x2F;", "\u3000", "x<sub>2</sub>", "10<sup>12</sup>", "<sub> small print </sub>", "`", "漢"),
        *(
            "𝑥",
            "¶",
            "4<sup>th</sup>",
            "y<sup>e</sup>",
            "9<sup>e</sup>",
            "a<sub>max</sub>",
            "e<sup>-n+1</sup>",
            "\u2009",
        ),
        *('w<sup><a href="u">1</a></sup>', "<sub>one <b>é</b> <code>x</code></sub>", "x<sup>[2]</sup>", "<sup>2</sup>"),
        *(
            "<sub> <sup>1</sup> é</sub>",
            "x<sup>1<b>2</sup>3</b>",
            "x<sup> a&nbsp;</sup>",
            "<time>noon</time>",
            "<sup>TM</sup>",
        ),
        *(
            "x<sub>ij</sub>",
            "x<sup>é</sup>",
            "x<sup></sup>",
            "x<sup>*</sup>",
            "x<sup>\u3000a b</sup>",
            "x<sub>(1)=n</sub>",
        ),
    ]
)
inline = st.recursive(
    words,
    lambda inner: (
        st.builds(
            lambda tag, parts: f"<{tag}>{''.join(parts)}</{tag.split()[0]}>",
            st.sampled_from(["b", "i", 'a href="u"', "em", "span", "code"]),
            st.lists(inner, max_size=2),
        )
        | st.sampled_from(["<br>", "<br/>", '<img src="a">'])
    ),
    max_leaves=4,
)
line = st.lists(inline, max_size=3).map("".join)


def wrapped(tags: list[str], inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(lambda tag, body: f"<{tag}>{body}</{tag.split()[0]}>", st.sampled_from(tags), inner)


def items(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(inner.map("<li>{}</li>".format), max_size=3).map("\n".join)


blocks = st.recursive(
    wrapped(["p", "h2", 'p class="x"'], line)
    | line.map("<p>{}".format)
    | st.sampled_from(["<hr>", "<pre><code>a\n  b\n</code></pre>", "\n", "<pre>\n\n x &lt;\n</pre>"])
    | st.just('<pre class="lang-py x"><code>a\n</code>\n</pre>'),
    lambda inner: (
        wrapped(["div", "blockquote", "section", "figure"], inner | line)
        | wrapped(["ul", "ol", 'ol start="3"'], items(inner | line))
        | st.lists(inner | line, max_size=3).map("\n".join)
    ),
    max_leaves=6,
)


@given(st.lists(blocks | line, max_size=4).map("".join))
@settings(max_examples=600, deadline=None)
def test_the_scanner_agrees_with_the_tree(html: str) -> None:
    text = scan_to_text(html.encode())
    assert text is None or text == (fragment_to_text(html) if "<" in html else text)
    assert fragment_to_text(html, compiled=True) == fragment_to_text(html)


PLAIN = {
    "a comment": "First<p>second <i>one</i><p><pre><code>  x = 1\n</code></pre>",
    "a post": "<p>Use <code>f(x)</code>:</p>\n\n<ul>\n<li>a</li>\n<li><p>b</p><p>c</p></li>\n</ul>\n<hr><p>A&amp;T</p>",
    "a chapter": '<div class="c"><h2>I.</h2><blockquote><p>So<br/>it goes</p></blockquote><img src="a.png"/></div>',
    "a language": '<pre class="lang-py"><code>x</code></pre>',
    "a title in lines": "<h1>The<br/>\nBook</h1>",
    "the mark of a note": '<p>said<sup><a href="#n">12</a></sup> so x<sub>max</sub> e<sup>n-1</sup> 4<sup>th</sup></p>',
    "small print": "<p><sub>1. comme <b>ça</b> : x<sup>2</sup></sub></p>",
    "an anchor that marks a page": '<p>x<a class="pageno" id="p2"></a> y<a\n class="pageno" /> z</p>',
    "a quoted bracket": '<p><a title="1 &lt; 2">x</a></p>',
}
FOR_THE_TREE = {
    "a table": "<table><tr><td>a<td>b</table>",
    "crossed tags": "<ul><p></ul></p>",
    "a bracket in a value": '<p><a title="a>b">x</a></p>',
    "hidden text": "<p hidden>x</p><p>y</p>",
    "a style": '<p style="display:none">x</p><p>y</p>',
    "an unknown entity": "<p>&fjlig;</p>",
    "a comment": "<p>a<!-- b --></p>",
    "a class that hides": '<p>x <span class="y sr-only">z</span></p>',
    "crossed scripts": "<p>x<sub>1<sup>2</sub>3</sup></p>",
    "an image of a formula": '<img class="latex" alt="x^2">',
    "code by the class around": '<div class="highlight"><pre>x</pre></div>',
}


@pytest.mark.parametrize("html", PLAIN.values(), ids=PLAIN)
def test_plain_markup_needs_no_tree(html: str) -> None:
    assert scan_to_text(html.encode()) == fragment_to_text(html)


@pytest.mark.parametrize("html", FOR_THE_TREE.values(), ids=FOR_THE_TREE)
def test_other_markup_goes_to_the_tree(html: str) -> None:
    assert scan_to_text(html.encode()) is None
    assert fragment_to_text(html, compiled=True) == fragment_to_text(html)


def test_a_change_of_any_file_changes_the_key_of_the_compiled_code(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.py", "b.py")]
    for file in files:
        file.write_text("x = 1\n")
    before = checksum_of_files(files)
    files[1].write_text("x = 2\n")
    assert 0 < checksum_of_files(files) != before > 0
