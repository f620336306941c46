"""Filters that look at what a text says: language, addresses, personal data, words, quality."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piledriver.core.errors import UsageError
from piledriver.corpus.document import Document
from piledriver.corpus.filters import FILTERS, Drop
from piledriver.corpus.filters.classifier import (
    ClassifierSettings,
    evaluate_classifier,
    load_classifier,
    train_classifier,
)
from piledriver.corpus.filters.code import Code
from piledriver.corpus.filters.language import Language
from piledriver.corpus.filters.pii import Pii
from piledriver.corpus.filters.profanity import Profanity
from piledriver.corpus.filters.quality import Quality, pareto
from piledriver.corpus.filters.urls import Urls


def reason(verdict: Document | Drop) -> str:
    return verdict.reason if isinstance(verdict, Drop) else "kept"


def test_language_keeps_what_is_asked_for_and_says_it() -> None:
    english = Document("The committee met on Tuesday and agreed that the road should be built before the winter.")
    kept = Language()(english)
    assert isinstance(kept, Document)
    assert kept.meta == {"language": "en"}
    french = Document("Le comité s'est réuni mardi et a décidé que la route devrait être construite avant l'hiver.")
    assert Language()(french) == Drop("language", "fr")
    assert reason(Language(keep=["fr", "en"])(french)) == "kept"
    assert Language()(Document("7 8 9")) == Drop("language", "unknown")
    assert reason(Language(keep_unknown=True)(Document("7 8 9"))) == "kept"


def test_urls_block_domains_with_what_is_below_them_and_single_pages(tmp_path: Path) -> None:
    (tmp_path / "domains").write_text("# unwanted\nBad.example\n\nwww.worse.example\n")
    (tmp_path / "urls").write_text("https://good.example/secret/\n")
    judge = Urls(domains=str(tmp_path / "domains"), urls=str(tmp_path / "urls"))

    def verdict(url: str) -> str:
        return reason(judge(Document("x", meta={"url": url})))

    assert verdict("http://bad.example/page") == "url: domain on the block list"
    assert verdict("https://a.b.BAD.example:8080/") == "url: domain on the block list"
    assert verdict("worse.example/x") == "url: domain on the block list"
    assert verdict("https://notbad.example/") == "kept"
    assert verdict("http://www.good.example/secret#top") == "url: on the block list"
    assert verdict("http://good.example/secret/more") == "kept"
    assert verdict("http://[broken") == "kept"
    assert reason(judge(Document("x"))) == "kept"
    assert reason(Urls(keep_without_url=False)(Document("x"))) == "no url"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def add(a, b):\n    return a + b\n", "kept"),
        ("x = 1; " * 200, "code: longest line"),
        ("\n".join("a = call(b) " * 15 for _ in range(5)), "code: mean line length"),
        ("1 2 3 4 5 6\n" * 20, "code: digits"),
        ("{};()\n" * 20, "code: alphanumeric characters"),
        (" \n", "code: empty"),
    ],
)
def test_code(text: str, expected: str) -> None:
    assert reason(Code()(Document(text))) == expected


# Put together here, so that no scanner takes this file for a leak.
AWS, GITHUB = "AKIA" + "IOSFODNN7EXAMPLE", "ghp_" + "a1B2" * 9
JWT = "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJ" + "zdWIiOiIxMjM0NTY3ODkwIn0" + "." + "dozjgNryP4J3jVmNHl0w5N"
PRIVATE = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "expected", "kinds"),
    [
        ("mail a.b+c@mail.example.co.uk.", "mail <EMAIL>.", {"email": 1}),
        ("at 93.184.216.34 and 2606:4700:4700::1111", "at <IP> and <IP>", {"ip": 2}),
        ("card 4111-1111-1111-1111, 5500005555555559", "card <CARD>, <CARD>", {"card": 2}),
        ("call +44 20 7946 0958 or (212) 555-0187", "call <PHONE> or <PHONE>", {"phone": 2}),
        (f"key={AWS} token {GITHUB}", "key=<KEY> token <KEY>", {"key": 2}),
        (f"Bearer {JWT}", "Bearer <KEY>", {"key": 1}),
        (f"before\n{PRIVATE}\nafter", "before\n<KEY>\nafter", {"key": 1}),
    ],
)
def test_pii_is_replaced_and_counted(text: str, expected: str, kinds: dict[str, int]) -> None:
    mended = Pii()(Document(text, meta={"licence": "MIT"}))
    assert mended.text == expected
    assert mended.meta == {"licence": "MIT", "replaced": kinds}


@pytest.mark.parametrize(
    "text",
    [
        "192.168.1.1 10.0.0.1 127.0.0.1 ::1 fe80::1 version 1.2.3.4.5 999.1.1.1",
        "4111 1111 1111 1112 is no card, nor 0000000000000000",
        "@decorator and a@b, user@localhost",
        "std::vector<int> a::b::c 12:34:56 (C::*)",
        "linux-2.6.35.9, section 17.4.4.4, C++ 14882: 22.2.1.5",
        "in 1999-2004, pages 212-555, 3.14159265358979 and 1,234,567,890",
        "isbn 978-3-16-148410-0",
    ],
)
def test_what_only_looks_like_pii_stays(text: str) -> None:
    assert Pii()(Document(text)).text == text


def test_pii_of_a_kind_that_is_not_asked_for_stays_and_counts_add_up() -> None:
    text = "a@example.com 93.184.216.34"
    assert Pii(kinds=["ip"])(Document(text)).text == "a@example.com <IP>"
    again = Pii()(Pii(kinds=["ip"], replacements={"ip": "b@example.com"})(Document(text)))
    assert again.meta["replaced"] == {"ip": 1, "email": 2}
    with pytest.raises(UsageError, match="unknown kind 'mail'"):
        Pii(kinds=["mail"])


@pytest.mark.parametrize("piece", ["a.", "1.", "1 ", "1-", "a@", "eyJ", "a:", "-----BEGIN PRIVATE KEY-----", "+1 ("])
def test_hostile_text_takes_no_pattern_hostage(piece: str) -> None:
    """A pattern that went back over what it had read would not come to an end of a megabyte."""
    text = piece * (1_000_000 // len(piece))
    kept = Pii()(Document(text)).text
    assert kept == text or "<KEY>" in kept


def test_profanity_counts_whole_words_and_phrases(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("darn\nholy smoke\n")
    judge = Profanity(words=str(tmp_path / "list"))
    assert reason(judge(Document("Oh DARN it"))) == "profanity"
    assert reason(judge(Document("Holy, smoke!"))) == "profanity"
    assert reason(judge(Document("darning holy men smoke"))) == "kept"
    assert reason(Profanity(words=str(tmp_path / "list"), max_share=0.5)(Document("oh darn it all"))) == "kept"


def texts(luck: random.Random, words: list[str], common: list[str], count: int) -> list[str]:
    return [" ".join(luck.choices(words, k=10) + luck.choices(common, k=40)) for _ in range(count)]


def test_a_classifier_learns_keeps_and_is_the_same_every_time(tmp_path: Path) -> None:
    luck = random.Random(0)
    common = [f"c{i}" for i in range(500)]
    good, bad = ([f"{kind}{i}" for i in range(100)] for kind in "gb")
    model = train_classifier(texts(luck, good, common, 300), texts(luck, bad, common, 300), ClassifierSettings(bits=14))
    held_out = texts(luck, good, common, 100), texts(luck, bad, common, 100)
    figures = evaluate_classifier(model, *held_out)
    assert figures["accuracy"] > 0.95
    assert figures["auc"] > 0.98
    shuffled = evaluate_classifier(model, texts(luck, common, common, 200), texts(luck, common, common, 200))
    assert 0.35 < shuffled["auc"] < 0.65, "nothing to tell, nothing told"
    model.save(tmp_path / "model")
    loaded = load_classifier(str(tmp_path / "model"))
    assert [loaded.score(text) for text in held_out[0]] == [model.score(text) for text in held_out[0]]
    judge = Quality(model=str(tmp_path / "model"), seed=1)
    documents = [Document(text, id=f"{number:032x}") for number, text in enumerate([*held_out[0], *held_out[1]])]
    verdicts = [reason(judge(document)) for document in documents]
    assert [reason(judge(document)) for document in reversed(documents)] == verdicts[::-1]
    assert verdicts[:100].count("kept") > 2 * verdicts[100:].count("kept")
    assert [reason(Quality(model=str(tmp_path / "model"), seed=2)(d)) for d in documents] != verdicts


def test_a_classifier_needs_both_kinds() -> None:
    with pytest.raises(UsageError, match="good and bad"):
        train_classifier(["a"], [])


@pytest.mark.parametrize(("alpha", "share"), [(1.0, 0.5), (3.0, 0.125)])
def test_the_pareto_rule_keeps_its_share(alpha: float, share: float) -> None:
    """P(Lomax > 1) = 2^-alpha: what a document of score 0 is kept with."""
    variates = np.array([pareto(alpha, 0, str(number)) for number in range(3000)])
    assert abs((variates > 1).mean() - share) < 4 * np.sqrt(share * (1 - share) / 3000)


@given(st.text(max_size=400))
def test_no_text_breaks_a_filter(text: str) -> None:
    for name in ("language", "urls", "code", "pii"):
        assert isinstance(FILTERS[name]()(Document(text, meta={"url": text})), (Document, Drop))


@pytest.mark.parametrize(
    "text",
    [
        "host 93.184.216.34",
        "ping 8.8.8.8",
        "Connected to 8.8.4.4 on port 53",
        "http://1.1.1.1/dns-query",
        "root@5.9.10.11:~#",
        "5.9.10.11:8080",
        "5.9.10.0/24 is announced",
        "Received: from mail ([93.184.216.34])",
        "93.184.216.34 - - [10/Oct/2000:13:55:36] GET /",
        "server=9.9.9.9",
        "DNS servers 9.9.9.9 and 1.1.1.1",
        "seen at 203.119.3.7 twice",
        "see 93.184.216.34 for the list",
        "[n=user@83.72.201.52.exetel.example] has joined",
    ],
)
def test_addresses_go(text: str) -> None:
    assert "<IP>" in Pii(kinds=["ip"])(Document(text)).text


@pytest.mark.parametrize(
    "text",
    [
        "version 1.2.3.4",
        "Version: 12.200.3.45",
        "v. 11.2.0.40 of the driver",
        "versions 9.50.1.2, 9.50.1.3 and 9.50.1.4 are affected",
        "upgraded to 4.35.100.2",
        "firmware 2.40.5030.1 and build 6.1.76.1",
        "from release 8.45.0.1 to 8.46.0.1",
        "Chrome/96.0.46.110 Safari",
        "openssl 1.1.1.1",
        "Section 4.120.3.2 applies",
        "see section 1.2.3.45(b)",
        "§ 25.1.2.34",
        "Rule 11.140.2.1",
        "clause (5.38.2.1)",
        "Figure 3.45.1.2 shows",
        "OID 1.3.6.100",
        "oid = 1.3.6.1.4.1.311",
        "4.5.2.50 Scope of the clause",
        "alcohol dehydrogenases\n    1.1.1.62 17beta-estradiol",
        "package 1.200.3.4-rc1",
        "1.2.3.40.jar and 2.3.4.50-beta2",
        "192.168.1.1, 127.0.0.1, 10.200.3.4 and 0.0.0.0",
        "999.1.1.1 or 01.02.03.04",
        "EC 1.14.13.39",
    ],
)
def test_versions_and_sections_stay(text: str) -> None:
    assert Pii(kinds=["ip"])(Document(text)).text == text
