"""PubMed Abstracts: which citations are taken, and what their text is."""

from __future__ import annotations

import gzip

import pytest
from hypothesis import given, settings

from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths
from tests.corpus.sources.mutating import mutations, parse_without_failure

HEAD = '<?xml version="1.0"?>\n<!DOCTYPE PubmedArticleSet SYSTEM "x.dtd">\n<PubmedArticleSet>\n'


def citation(pmid: str, title: str, abstract: str, ids: str = "") -> str:
    return (
        f"<PubmedArticle><MedlineCitation><PMID>{pmid}</PMID><Article><Journal><JournalIssue><PubDate><Year>1999</Year>"
        f"</PubDate></JournalIssue><Title>J</Title></Journal><ArticleTitle>{title}</ArticleTitle>{abstract}"
        f"<Language>eng</Language></Article></MedlineCitation><PubmedData>{ids}</PubmedData></PubmedArticle>\n"
    )


def extract(*citations: str) -> tuple[list[str], list[str]]:
    content = gzip.compress((HEAD + "".join(citations) + "</PubmedArticleSet>").encode())
    found, refusals = extract_bytes("pubmed-abstracts", "pubmed20n0001.xml.gz", content)
    return [document.text for document in found], [refusal.reason for refusal in refusals]


def test_title_newline_abstract_with_labels_and_no_copyright() -> None:
    abstract = (
        '<Abstract><AbstractText Label="AIM">To  see\n CO<sub>2</sub>.</AbstractText>'
        '<AbstractText Label="UNLABELLED">Seen.</AbstractText>'
        "<CopyrightInformation>(c) 1999 Press</CopyrightInformation></Abstract>"
    )
    assert extract(citation("1", "On &alpha;.", abstract)) == (["On α.\nAIM: To see CO₂. Seen."], [])


def test_what_is_missing_is_named() -> None:
    whole = "<Abstract><AbstractText>x</AbstractText></Abstract>"
    assert extract(citation("1", "T", ""), citation("2", "", whole), citation("3", "T", whole)) == (
        ["T\nx"],
        ["no abstract", "no title"],
    )


def test_only_the_articles_own_pmc_id_counts() -> None:
    whole = "<Abstract><AbstractText>x</AbstractText></Abstract>"
    pmc = '<ArticleIdList><ArticleId IdType="pmc">PMC1</ArticleId></ArticleIdList>'
    cited = f"<ReferenceList><Reference>{pmc}</Reference></ReferenceList>"
    assert extract(citation("1", "T", whole, pmc), citation("2", "T", whole, cited)) == (
        ["T\nx"],
        ["in pubmed central"],
    )


def test_a_bad_record_refuses_itself_alone() -> None:
    whole = "<Abstract><AbstractText>x</AbstractText></Abstract>"
    assert extract(citation("1", "T <b>", whole), citation("2", "T", whole)) == (["T\nx"], ["invalid xml"])


def test_a_truncated_file_gives_what_was_whole() -> None:
    whole = "<Abstract><AbstractText>x</AbstractText></Abstract>"
    content = gzip.compress((HEAD + "".join(citation(str(n), f"T{n}", whole) for n in range(3000))).encode(), 1)
    found, refusals = extract_bytes("pubmed-abstracts", "a.xml.gz", content[: len(content) * 2 // 3])
    assert len(found) > 1000
    assert [refusal.reason for refusal in refusals] == ["damaged data"]


def test_pieces_hold_whole_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piledriver.corpus.sources.shared.record_pieces.PIECE_BYTES", 1000)
    whole = "<Abstract><AbstractText>x</AbstractText></Abstract>"
    texts, refusals = extract(*(citation(str(number), f"T{number}", whole) for number in range(50)))
    assert texts == [f"T{number}\nx" for number in range(50)]
    assert not refusals


@pytest.mark.skipif(not (SAMPLES / "pubmed-abstracts").is_dir(), reason="../shared/raw-samples is not here")
def test_real_records() -> None:
    found, refusals = extract_paths("pubmed-abstracts", SAMPLES / "pubmed-abstracts")
    assert {document.meta["pmid"] for document in found} >= {"9997", "11748933", "29768149", "16377612"}
    assert {refusal.reason for refusal in refusals} == {"no abstract", "in pubmed central"}


VALID = (
    HEAD + citation("1", "T", "<Abstract><AbstractText Label='A'>x</AbstractText></Abstract>") + "</PubmedArticleSet>"
).encode()


@settings(max_examples=60, deadline=None)
@given(mutations(VALID))
def test_mutated_files_never_raise(content: bytes) -> None:
    parse_without_failure("pubmed-abstracts", content)
