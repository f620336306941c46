from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.formats.html.convert import fragment_to_text, page_to_text

CASES = {
    "paragraphs and inline markup": ("<p>One <b>bold</b><i> word</i>.</p>\n\n<p>Two", "One bold word.\n\nTwo"),
    "white space collapses": ("<p>a\n   b&nbsp;&#160; c</p>", "a b c"),
    "headings": ("<h1>A<br>B</h1><h3>C</h3>text", "# A B\n\n### C\n\ntext"),
    "a line of hashes is text": ("<p>###</p>", "###"),
    "breaks": ("a<br>b<br/><br>c", "a\nb\n\nc"),
    "lists nest": ("<ol><li>one<ul><li>in</ul><li>two</ol>after", "1. one\n   - in\n2. two\n\nafter"),
    "list numbers": ('<ol start=3 type="a"><li>x<li value=7>y</ol>', "c. x\ng. y"),
    "paragraphs in items": ("<ul><li><p>x</p><p>y</p></li><li>z</ul>", "- x\n\n  y\n- z"),
    "empty items vanish": ("<ul><li></li><li>a</ul>", "- a"),
    "quotations": ("<blockquote><p>a</p><p>b</p></blockquote>c", "> a\n>\n> b\n\nc"),
    "definitions": ("<dl><dt>T<dd>d<dd>e</dl>", "T\n: d\n: e"),
    "code is verbatim": (
        '<pre><code class="language-py">if x:\n    y &lt; 1\n\n\n\nz</code></pre>',
        "```py\nif x:\n    y < 1\n\n\n\nz\n```",
    ),
    "code inside a highlighter": (
        '<div class="highlight-python notranslate"><div class="highlight"><pre><b>x</b> = 1</pre></div></div>',
        "```python\nx = 1\n```",
    ),
    "other preformatted text has no fence": ("<pre>roses\n  are</pre>", "roses\n  are"),
    "br in pre": ("<pre>a<br>b</pre>", "a\nb"),
    "line numbers go": (
        '<table><tr><td class="gutter"><pre>1\n2</pre></td><td><pre>a\nb</pre></td></tr></table>',
        "a\nb",
    ),
    "inline code": ("use <code>a  b</code> <code></code>now", "use `a b` now"),
    "data tables": (
        "<table><caption>T</caption><tr><th>A<th>B<tr><td>1<td><p>2</p>3</table>",
        "T\n| A | B |\n|---|---|\n| 1 | 2 3 |",
    ),
    "empty cells keep their place": (
        "<table><tr><td>a<td><td>c<tr><td>d<td>e<td>f</table>",
        "| a |  | c |\n|---|---|---|\n| d | e | f |",
    ),
    "layout tables": ("<table><tr><td><p>a</p><p>b</p></td><td>c</td></tr></table>", "a\n\nb\n\nc"),
    "superscripts": (
        "m<sup>2</sup> 4<sup>th</sup> x<sup>a+b</sup> y<sup>a</sup> 1<sup>a</sup>",
        "m² 4th x^{a+b} y^a 1a",
    ),
    "note marks": ("said<sup><a href='#1'>1</a></sup> so<sup>[2]</sup>", "said[1] so[2]"),
    "subscripts": ("H<sub>2</sub>O x<sub>i</sub>", "H₂O x_i"),
    "MathML": ("<p>is <math><msqrt><mi>x</mi></msqrt></math>", "is $\\sqrt{x}$"),
    "MathML annotation": (
        "<math display=block><semantics><mi>x</mi><annotation encoding='application/x-tex'>\\alpha</annotation>"
        "</semantics></math>",
        "$$\\alpha$$",
    ),
    "MathJax source": (
        "a <span class='MathJax'>drawn</span><script type='math/tex'>x^2</script> b",
        "a $x^2$ b",
    ),
    "KaTeX once": (
        "<span class=katex><span class=katex-mathml><math><annotation encoding='application/x-tex'>y</annotation>"
        "</math></span><span class=katex-html aria-hidden=true>y drawn</span></span>",
        "$y$",
    ),
    "LaTeX image": ('<img class="latex" alt="e^x"> and <img alt="photo" src="x">', "$e^x$ and"),
    "hidden": (
        "<p>a<span style='DISPLAY: none'>x</span><b hidden>y</b><i aria-hidden='true'>z</i>b</p>",
        "ab",
    ),
    "scripts and styles": ("a<script>x<y</script><style>p{}</style><noscript>n</noscript>b", "ab"),
    "quotes and rules": ("<q>a</q><hr>b", "“a”\n\n---\n\nb"),
    "ruby": ("<ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>", "漢(kan)"),
    "entities": ("&lt;p&gt; &amp;amp; &hellip; &#x27;", "<p> &amp; … '"),
    "no markup at all": ("plain\n text", "plain text"),
    "less-than signs": ("<p>1 < 2 && 3 > 2", "1 < 2 && 3 > 2"),
    "comments": ("a<!-- no -->b", "ab"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fragment_is_what_a_reader_sees(case: str) -> None:
    html, text = CASES[case]
    assert fragment_to_text(html) == text


PROSE = "<p>This is a sentence of the article, and it has a clause. Here is another, which makes it prose.</p>" * 6


@pytest.mark.parametrize(
    "page",
    [
        f"<nav><a href=/>Home</a></nav><article><h1>T</h1>{PROSE}</article><footer>Imprint and more</footer>",
        f"<div class=sidebar>{PROSE[:98]}</div><div id=content>{PROSE}</div>",
        f"<table><tr><td><a href=/>x</a> <a href=/>y</a></td><td>{PROSE}</td></tr></table>",
        f"<div class='post-body comments-open'>{PROSE}</div><div class=comments>{PROSE}</div>",
        f"<ul>{'<li><a href=x>Another story to read</a>' * 9}</ul><div>{PROSE}</div>",
        # A theme that calls everything a widget: the name alone must not cost the text.
        f"<div class=widget>{PROSE}</div><div><a href=/>Imprint</a></div>",
    ],
)
def test_a_page_is_its_content(page: str) -> None:
    text = page_to_text(f"<html><head><title>Title</title></head><body>{page}</body></html>")
    assert text.count("This is a sentence") == 6
    assert "Imprint" not in text
    assert "Another story" not in text
    assert "Home" not in text


def test_a_page_without_prose_is_read_as_it_stands() -> None:
    assert page_to_text("<ul><li><a href=x>a</a></ul>") == "- a"
    assert page_to_text("") == ""


def test_depth_costs_neither_stack_nor_text() -> None:
    assert fragment_to_text("<div>" * 50_000 + "deep") == "deep"
    assert fragment_to_text("<blockquote>" * 1_500 + "deep").endswith("deep")
    assert fragment_to_text("<math>" * 1_900 + "<mi>x</mi>") in ("$x$", "")
    assert "deep" in page_to_text("<ul><li>" * 900 + "deep")


def test_thousands_of_attributes_do_not_hold_up_the_rest() -> None:
    many = " ".join(f"a{number}=1" for number in range(300_000))
    assert fragment_to_text(f"<p {many}>one</p><p>two") == "one\n\ntwo"
    image = f'<img class="latex" alt="x" src="data:image/png;base64,{"A" * 90_000}">'
    assert fragment_to_text(f"<p>{image} is") == "$x$ is"


tags = st.sampled_from(
    str.split(
        "p div ul ol li table tr td th pre code blockquote dl dt dd sub sup math mi h2 br hr q rt img script a span"
    )
)
pieces = st.one_of(
    st.text(max_size=8),
    tags.map(lambda tag: f"<{tag}>"),
    tags.map(lambda tag: f"</{tag}>"),
    st.sampled_from(
        ["<p class=comments style='display:none'", "&#0;", "&nbsp", "<!--", "]]>", "\x00", "\ud800", "<a href="]
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(pieces, max_size=40).map("".join))
def test_any_input_is_text(html: str) -> None:
    for text in (fragment_to_text(html), page_to_text(html)):
        assert "\x01" not in text
        assert not text.startswith("\n")


def test_columns_of_old_pages_are_no_data_and_formulas_in_scripts_are_text() -> None:
    prose = "This is a sentence of the article, and it has a clause. Here is another one, which makes it prose. " * 7
    columns = f"<body><table><tr><td><a href=a>Menu</a></td><td>{prose}<br>End.</td></tr></table></body>"
    assert "|" not in page_to_text(columns)
    assert "| 1 | 2 |" in fragment_to_text(f"<p>{prose}<table><tr><td>1<td>2<tr><td>3<td>4</table>")
    inline = f"<body><p>{prose} Let <script type='math/tex'>a^2</script> be. <script>no()</script></p></body>"
    assert page_to_text(inline).endswith("Let $a^2$ be.")


def test_linked_titles_of_entries_are_kept_and_lists_of_links_are_not() -> None:
    title = "Mitigating the Barriers to Public Interaction"
    entries = "".join(
        f"<li><div><div class=title><a href=a>{title} {n}</a></div><div>Ann Roe, Bob Doe, Carl Poe, Dora Moe, Emil Foe"
        f" and others, in the proceedings of the year {n}.</div><div><a href=b>arXiv</a></div></div></li>"
        for n in range(4)
    )
    links = "".join(f"<li><div><a href=c>Something else that you may like {n}</a></div></li>" for n in range(9))
    text = page_to_text(f"<body><h1>Papers</h1><ol>{entries}</ol><ul>{links}</ul></body>")
    assert text.count(title) == 4
    assert "arXiv" not in text
    assert "you may like" not in text


def wiki_page(content: str) -> str:
    """A page of MediaWiki with its menus, languages and footer."""
    menu = "".join(f'<li class="mw-list-item"><a href="x">Menu {number}</a></li>' for number in range(40))
    boxes = f'<div role="navigation" class="navbox"><ul>{menu}</ul></div><div class="printfooter">Retrieved</div>'
    footer = "<li>Text is available under a licence; additional terms may apply. By using this site, you agree.</li>"
    return (
        f'<body><header><nav><ul>{menu}</ul></nav></header><div id="p-lang-btn" class="vector-dropdown"><ul>{menu}</ul>'
        f'</div><main id="content"><h1>T</h1><div id="mw-content-text"><div class="mw-parser-output">'
        f'<div class="hatnote">Main article: <a href="x">Other</a></div>{content}{boxes}</div></div>'
        f'<div class="catlinks"><a href="x">Categories</a></div></main><footer><ul>{footer}</ul></footer></body>'
    )


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("<p>T is a town, on a river, with a long history of trade.</p>" * 3, "T is a town"),
        ("<p>T is a town.</p>", "T is a town."),
        ("<ul>" + "".join(f'<li><a href="x">Entry {n}</a></li>' for n in range(30)) + "</ul>", "- Entry 0\n- Entry 1"),
    ],
    ids=["prose", "a short page", "a list of links"],
)
def test_a_page_of_mediawiki_keeps_its_content_and_no_navigation(content: str, wanted: str) -> None:
    text = page_to_text(wiki_page(content))
    assert text.startswith(wanted)
    for word in ("Menu", "Main article", "Retrieved", "Categories", "additional terms"):
        assert word not in text


def test_a_heading_goes_with_the_list_of_links_below_it() -> None:
    prose = "<p>The town is on a river, has a long history of trade, and lies in the north.</p>" * 4
    links = "<ul>" + "".join(f'<li><a href="x">A link of some length, number {n}</a></li>' for n in range(9)) + "</ul>"
    page = f"<div><h2>Town</h2>{prose}<h2>Travel</h2>{links}<h2>More</h2>{prose}<h2>Elsewhere</h2>{links}</div>"
    text = page_to_text(page)
    assert [line for line in text.split("\n") if line.startswith("#")] == ["## Town", "## More"]
