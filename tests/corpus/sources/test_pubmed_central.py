"""PubMed Central: each test shows one rule of the JATS converter."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings

from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths
from tests.corpus.sources.mutating import mutations, parse_without_failure

FRONT = """<front><journal-meta><journal-title>J. Test</journal-title></journal-meta><article-meta>
<article-id pub-id-type="pmc">42</article-id><article-id pub-id-type="doi">10.1/x</article-id>
<title-group><article-title>A <italic>title</italic><xref ref-type="fn">*</xref></article-title></title-group>
<contrib-group><contrib><name><surname>Nobody</surname></name></contrib></contrib-group>
<pub-date pub-type="epub"><day>2</day><month>8</month><year>2011</year></pub-date>
<permissions><license xlink:href="http://creativecommons.org/licenses/by/2.0"><license-p>Open.</license-p></license>
</permissions><abstract><p>Short.</p></abstract></article-meta></front>"""
NAMESPACES = (
    'xmlns:xlink="http://www.w3.org/1999/xlink" xmlns:mml="http://www.w3.org/1998/Math/MathML" '
    'article-type="research-article"'
)


def article(body: str, back: str = "", front: str = FRONT) -> bytes:
    return f"<article {NAMESPACES}>{front}<body>{body}</body><back>{back}</back></article>".encode()


def text_of(body: str, back: str = "") -> str:
    documents, refusals = extract_bytes("pubmed-central", "a.nxml", article(body, back))
    assert not refusals
    return documents[0].text.removeprefix("# A title\n\n## Abstract\n\nShort.").strip()


def test_title_and_abstract_come_first_and_meta_holds_the_ids() -> None:
    documents, _ = extract_bytes("pubmed-central", "a.nxml", article("<p>Body.</p>"))
    assert documents[0].text == "# A title\n\n## Abstract\n\nShort.\n\nBody."
    meta = documents[0].meta
    assert (meta["pmcid"], meta["doi"], meta["date"]) == ("PMC42", "10.1/x", "2011-08-02")
    assert meta["licence"] == "CC-BY-2.0"
    assert "Nobody" not in documents[0].text


@pytest.mark.parametrize(
    ("permissions", "licence"),
    [
        ("<copyright-statement>© 2008 Smith et al</copyright-statement>", "unknown"),
        ("<license><license-p>© 2008 Smith et al. All rights reserved.</license-p></license>", "unknown"),
        ("<copyright-statement>This is under CC BY 4.0, © 2008</copyright-statement>", "CC-BY-4.0"),
        ("<license><license-p>Free to read for a year.</license-p></license>", "Free to read for a year."),
    ],
)
def test_a_line_of_copyright_is_no_licence(permissions: str, licence: str) -> None:
    front = f"<front><article-meta><permissions>{permissions}</permissions></article-meta></front>"
    documents, _ = extract_bytes("pubmed-central", "a.nxml", article("<p>Body.</p>", front=front))
    assert documents[0].meta["licence"] == licence


def test_sections_become_headings_by_their_depth() -> None:
    body = "<sec><title>One</title><p>a</p><sec><label>1.1</label><title>Two</title><p>b</p></sec></sec>"
    assert text_of(body) == "## One\n\na\n\n### 1.1 Two\n\nb"


def test_raised_and_lowered_text_keeps_its_meaning() -> None:
    assert text_of("<p>10<sup>-3</sup> M H<sub>2</sub>O, K<sub>max </sub>of</p>") == "10⁻³ M H₂O, K_{max} of"


def test_raised_citations_become_brackets() -> None:
    body = '<p>shown<sup><xref ref-type="bibr" rid="b1">1</xref>,<xref ref-type="bibr" rid="b2">2</xref></sup>.</p>'
    assert text_of(body) == "shown[1,2]."


def test_lists_with_their_marks_and_their_nesting() -> None:
    body = """<list list-type="order"><list-item><p>a</p></list-item><list-item><p>b</p>
    <list list-type="bullet"><list-item><p>c</p></list-item></list></list-item></list>"""
    assert text_of(body) == "1. a\n2. b\n   - c"


def test_tables_keep_their_grid_where_cells_span() -> None:
    body = """<table-wrap><label>Table 1</label><caption><p>Counts</p></caption><table><thead><tr><th>k</th>
    <th colspan="2">v</th></tr></thead><tbody><tr><td rowspan="2">x</td><td>1</td><td>2</td></tr><tr><td>3</td>
    <td>4</td></tr></tbody></table><table-wrap-foot><fn><p>n = 4</p></fn></table-wrap-foot></table-wrap>"""
    table = "| k | v |  |\n|---|---|---|\n| x | 1 | 2 |\n|  | 3 | 4 |"
    assert text_of(body) == f"Table 1. Counts\n\n{table}\n\nn = 4"


def test_a_table_beside_its_picture_and_marks_of_notes() -> None:
    body = """<table-wrap><alternatives><graphic/><table><tr><td>k<xref ref-type="table-fn">a</xref></td><td>v</td></tr>
    </table></alternatives></table-wrap>"""
    assert text_of(body) == "| k^a | v |\n|---|---|"


def test_a_span_of_a_million_does_not_fill_memory() -> None:
    assert len(text_of('<table><tr><td colspan="999999">x</td><td rowspan="99999999">y</td></tr></table>')) < 1000


def test_formulas_take_the_publishers_tex_before_mathml() -> None:
    tex = r"\documentclass{x}\begin{document}$$\alpha_1$$\end{document}"
    math = "<mml:math><mml:mi>z</mml:mi></mml:math>"
    body = f"<p>Let <inline-formula><alternatives><tex-math>{tex}</tex-math>{math}</alternatives></inline-formula>.</p>"
    assert text_of(body) == r"Let $\alpha_1$."


def test_mathml_becomes_latex_and_a_display_keeps_its_label() -> None:
    body = """<p>So <disp-formula><label>(3)</label><mml:math><mml:msub><mml:mi>σ</mml:mi><mml:mn>2</mml:mn></mml:msub>
    <mml:mo>=</mml:mo><mml:msqrt><mml:mi>x</mml:mi></mml:msqrt></mml:math></disp-formula> holds.</p>"""
    assert text_of(body) == "So\n\n$$\\sigma_{2} = \\sqrt{x}$$ (3)\n\nholds."


def test_a_long_division_is_one_formula_and_an_abstract_has_a_heading() -> None:
    rows = "<msrow><mn>1306</mn></msrow><msgroup><msrow><mn>12</mn></msrow></msgroup>"
    division = f"<mml:math><mml:mlongdiv><mml:mn>3</mml:mn><mml:mn>435</mml:mn>{rows}</mml:mlongdiv></mml:math>"
    assert text_of(f"<p><inline-formula>{division}</inline-formula></p>") == "$1306 \\div 3 = 435$"
    front = FRONT.replace("<abstract>", "<abstract><title/>")
    documents, _ = extract_bytes("pubmed-central", "a.nxml", article("<p>Body.</p>", front=front))
    assert documents[0].text == "# A title\n\n## Abstract\n\nShort.\n\nBody."


def test_figures_give_their_captions_and_references_are_left_out() -> None:
    body = "<fig><label>Fig 1</label><caption><title>Growth</title><p>By day.</p></caption><graphic/></fig>"
    back = "<ack><p>Thanks.</p></ack><ref-list><ref><mixed-citation>Nobody 1999</mixed-citation></ref></ref-list>"
    assert text_of(body, back) == "Fig 1. Growth. By day.\n\n## Acknowledgements\n\nThanks."


def test_named_characters_need_no_dtd() -> None:
    assert text_of("<p>&agr;-helix &lsquo;x&rsquo; &amp; y</p>") == "α-helix ‘x’ & y"


def test_an_entity_bomb_expands_to_nothing() -> None:
    bomb = b'<!DOCTYPE article [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>' + article("<p>x&b;y</p>")
    documents, _ = extract_bytes("pubmed-central", "a.nxml", bomb)
    assert "haha" not in "".join(document.text for document in documents)


def test_deep_nesting_does_not_break_the_stack() -> None:
    depth = 200
    documents, refusals = extract_bytes(
        "pubmed-central", "a.nxml", article("<sec>" * depth + "<p>deep</p>" + "</sec>" * depth)
    )
    assert refusals or "deep" in documents[0].text


def test_articles_in_a_tar_gz_are_found_and_a_bad_one_refuses_itself() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in (("P/a.nxml", article("<p>good</p>")), ("P/b.nxml", b"<article"), ("P/c.pdf", b"%PDF")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    documents, refusals = extract_bytes("pubmed-central", "oa_comm_xml.tar.gz", buffer.getvalue())
    assert [document.meta["origin"] for document in documents] == ["oa_comm_xml.tar.gz!P/a.nxml"]
    assert [refusal.reason for refusal in refusals] == ["invalid xml"]


@pytest.mark.skipif(not (SAMPLES / "pubmed-central").is_dir(), reason="../shared/raw-samples is not here")
def test_real_articles() -> None:
    documents, refusals = extract_paths("pubmed-central", SAMPLES / "pubmed-central")
    assert len(documents) == 8
    assert not refusals
    for document in documents:
        assert document.text.startswith(f"# {document.meta['title']}")
        assert len(document.text) > 20_000
        assert "</" not in document.text
        assert "xref" not in document.text
        assert document.meta["licence"].startswith(("CC", "public"))


VALID = article("<sec><title>T</title><p>a <sup>2</sup></p><list><list-item><p>x</p></list-item></list></sec>")


@settings(max_examples=60, deadline=None)
@given(mutations(VALID))
def test_mutated_articles_never_raise(content: bytes) -> None:
    parse_without_failure("pubmed-central", content)
