from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piledriver.corpus.text.normalise import (
    _MAY_NOT_BE_NFC,
    NotTextError,
    decode_text,
    is_binary,
    normalise,
    normalise_code,
)


@given(st.text())
def test_normalising_twice_changes_nothing_more(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
    once.encode("utf-8")


@given(st.binary())
def test_any_bytes_decode_or_are_not_text(content: bytes) -> None:
    try:
        decode_text(content).encode("utf-8", "surrogatepass")
    except NotTextError:
        assert is_binary(content)


def test_wide_encodings_without_a_mark_are_text() -> None:
    for encoding in ("utf-16-le", "utf-16-be"):
        assert decode_text("Plain Latin text, naïve at that.".encode(encoding)) == "Plain Latin text, naïve at that."


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-16", "utf-8-sig", "cp1252", "cp1250", "shift_jis", "koi8-r", "gb18030"]
)
def test_real_encodings_are_recognised(encoding: str) -> None:
    text = {
        "cp1250": "Příliš žluťoučký kůň úpěl ďábelské ódy. Dnes je hezky a půjdeme ven. " * 5,
        "shift_jis": "これは日本語の文章です。今日は天気がいいですね。東京は日本の首都です。" * 5,
        "koi8-r": "Это русский текст, который должен быть распознан правильно. Москва столица России. " * 5,
        "gb18030": "这是一个中文文本。北京是中国的首都。今天天气很好，我们去公园玩。" * 5,
    }.get(encoding, "Naïve café – “quoted” résumé. " * 5)
    assert decode_text(text.encode(encoding)) == text


def test_controls_line_breaks_and_blank_lines_are_put_in_one_form() -> None:
    assert normalise("a\r\nb\rc\x0bd\u2028e") == "a\nb\nc\nd\ne"
    assert normalise("a \t\n\n\n\n\nb\x00\x7f\xadc\ufeff") == "a\n\nbc"
    assert normalise("fu\u0308r") == "für"
    assert normalise("schÃ¶n and cafÃ©, itâ€™s") == "schön and café, it’s"
    assert normalise("NÃO É PERMITIDO EM SÃO PAULO") == "NÃO É PERMITIDO EM SÃO PAULO"


def test_code_is_left_alone() -> None:
    assert normalise_code("a\r\n\tb  \n\n\n\n\x0cc\x00") == "a\n\tb  \n\n\n\n\x0cc"


def test_whatever_may_not_be_composed_is_looked_at() -> None:
    """The quick look at bytes misses no character that stands for another, combines or can be combined with."""
    seconds = {
        int(parts[1], 16)
        for code in range(0x110000)
        if len(parts := unicodedata.decomposition(chr(code)).split()) == 2 and parts[0][0] != "<"
    }
    jamo = {*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)}
    for code in range(0x80, 0x110000):
        character = chr(code)
        if 0xD800 <= code < 0xE000:
            continue
        if (
            code in seconds
            or code in jamo
            or unicodedata.combining(character)
            or not unicodedata.is_normalized("NFC", character)
        ):
            assert _MAY_NOT_BE_NFC.search(character.encode()), hex(code)
