"""OpenSubtitles and YouTube captions: formats, rolling captions, languages side by side."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.document import Document
from piledriver.corpus.extraction import extract_files
from piledriver.corpus.formats.subtitles.formats import read_captions
from piledriver.corpus.formats.subtitles.transcript import plain_transcript
from piledriver.corpus.sources import SOURCES
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths

OPUS = b"""<?xml version="1.0" encoding="utf-8"?>
<document id="42"><s id="1"><time id="T1S" value="00:00:01,000" />
- Hello &amp; welcome.
<time id="T1E" value="00:00:02,000" /></s><s id="2">/ Bye /</s>
<meta><subtitle><language>English</language></subtitle><source><year>1933</year></source></meta></document>"""

TOKENS = b"""<document><s id="1"><w id="1.1">I</w> <w id="1.2">do</w> <w id="1.3">n't</w> <w id="1.4">know</w>
<w id="1.5">.</w></s></document>"""


def test_opus_sentences_are_quoted_on_one_line_as_in_the_pile() -> None:
    documents, refusals = extract_bytes("opensubtitles", "42.xml", OPUS)
    assert refusals == []
    assert documents[0].text == '"Hello & welcome." "Bye"'
    assert documents[0].meta["year"] == "1933"


def test_opus_sentences_as_lines(tmp_path: Path) -> None:
    (tmp_path / "42.xml").write_bytes(OPUS)
    (found,) = extract_files(SOURCES["opensubtitles"].with_settings(form="lines"), [str(tmp_path / "42.xml")])
    assert isinstance(found, Document)
    assert found.text == "Hello & welcome.\nBye"


@pytest.mark.skipif(not (SAMPLES / "opensubtitles").exists(), reason="the shared raw samples are not here")
def test_a_film_is_the_original_but_for_its_stray_spaces() -> None:
    """Compare with the rule of the original: text of each <s>, no line breaks, spaces, dashes, slashes off, quoted."""
    films, _ = extract_paths("opensubtitles", SAMPLES / "opensubtitles")
    raw = ElementTree.fromstring((SAMPLES / "opensubtitles" / "example.xml").read_bytes())
    said = ["".join(element.itertext()) for element in raw.iter("s")]
    stripped = [one.replace("\n", "").replace("\t", "").strip().strip("-").strip("/") for one in said]
    assert films[0].text == " ".join('"' + " ".join(one.split()) + '"' for one in stripped)


def test_opus_tokens_are_put_together() -> None:
    documents, _ = extract_bytes("opensubtitles", "42.xml", TOKENS)
    assert documents[0].text == '"I don\'t know."'


def test_french_tokens_are_put_together() -> None:
    words = "".join(f"<w>{word}</w> " for word in ("L'", "homme", "qu'", "il", "voit", ",", "dit-il", "."))
    documents, _ = extract_bytes("opensubtitles", "fr.xml", f"<document><s>{words}</s></document>".encode())
    assert documents[0].text == "\"L'homme qu'il voit, dit-il.\""


def test_a_zip_of_gzipped_files_says_which_film() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("OpenSubtitles/raw/en/1933/24240/42.xml.gz", gzip.compress(OPUS))
    documents, _ = extract_bytes("opensubtitles", "en.zip", packed.getvalue())
    assert documents[0].meta["imdb_id"] == "tt0024240"
    assert documents[0].meta["language"] == "en"


def test_srt_joins_sentences_and_drops_formatting() -> None:
    srt = "1\r\n00:00:01,000 --> 00:00:02,000\r\n"
    srt += "{\\an8}<i>I was\r\n\r\n2\r\n00:00:02,000 --> 00:00:03,000\r\nhere</i>\r\n- Really?\r\n"
    documents, _ = extract_bytes("opensubtitles", "a.srt", srt.encode("utf-16"))
    assert documents[0].text == '"I was here" "Really?"'


def test_entities_of_a_bomb_are_not_expanded() -> None:
    bomb = b'<!DOCTYPE d [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]><document><s>x&b;y</s></document>'
    documents, _ = extract_bytes("opensubtitles", "a.xml", bomb)
    assert all("haha" not in document.text for document in documents)


FORMATS = {
    "srt": b"1\n00:00:01,500 --> 00:00:02,000\nHi <b>you</b>\n\n2\n00:00:03,000 --> 00:00:04,000\n7\n",
    "vtt": b"WEBVTT\nKind: captions\n\nNOTE hidden\nmore\n\n"
    b"id\n00:01.500 --> 00:02.000 align:start\n<v Bo>Hi you\n\n00:03.000 --> 00:04.000\n7\n",
    "sbv": b"0:00:01.500,0:00:02.000\nHi you\n\n0:00:03.000,0:00:04.000\n7\n",
    "srv1": b'<transcript><text start="1.5" dur="0.5">Hi you</text><text start="3" dur="1">7</text></transcript>',
    "srv3": b'<timedtext format="3"><body><p t="1500" d="500"><s>Hi</s><s> you</s></p>'
    b'<p t="3000" d="1000">7</p></body></timedtext>',
    "ttml": b'<tt xmlns="http://www.w3.org/ns/ttml"><body><div>'
    b'<p begin="00:00:01.500" end="00:00:02.000">Hi<br/>you</p>'
    b'<p begin="3s" end="4s">7</p></div></body></tt>',
    "json3": b'{"events":[{"tStartMs":1500,"dDurationMs":500,"segs":[{"utf8":"Hi"},{"utf8":" you"}]},'
    b'{"tStartMs":1600,"aAppend":1,"segs":[{"utf8":"\\n"}]},'
    b'{"tStartMs":3000,"dDurationMs":1000,"segs":[{"utf8":"7"}]}]}',
    "json": b'[{"text":"Hi you","start":1.5,"duration":0.5},{"text":"7","start":3,"duration":1}]',
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_cues(name: str) -> None:
    cues = read_captions(FORMATS[name]).cues
    assert [(cue.start, cue.end, " ".join(cue.lines)) for cue in cues] == [(1.5, 2.0, "Hi you"), (3.0, 4.0, "7")]


def test_rolling_captions_are_told_once() -> None:
    rolling = b"""WEBVTT

00:00:00.000 --> 00:00:02.000 align:start position:0%

one<00:00:00.500><c> two</c><00:00:01.000><c> three</c>

00:00:02.000 --> 00:00:02.010 align:start position:0%
one two three

00:00:02.010 --> 00:00:04.000 align:start position:0%
one two three
four<00:00:03.000><c> five</c>

00:00:04.000 --> 00:00:04.010
four five
"""
    captions = read_captions(rolling)
    assert captions.generated
    assert [cue.lines for cue in captions.cues] == [["one two three"], ["four five"]]


def test_languages_of_one_video_stand_side_by_side_by_the_minute(tmp_path: Path) -> None:
    def srt(*cues: tuple[int, str]) -> str:
        return "\n\n".join(f"1\n00:0{m}:01,000 --> 00:0{m}:02,000\n{said}" for m, said in cues)

    (tmp_path / "V [YtkIWDE36qU].en.srt").write_text(srt((0, "one"), (1, "two")))
    (tmp_path / "V [YtkIWDE36qU].fr.srt").write_text(srt((0, "un"), (1, "deux")))
    (tmp_path / "V [YtkIWDE36qU].info.json").write_text('{"title": "V", "license": "Creative Commons Attribution"}')
    (tmp_path / "W.de.srt").write_text(srt((0, "eins")))
    documents, _ = extract_paths("youtubesubtitles", tmp_path)
    assert len(documents) == 2
    both = documents[0]
    assert both.meta["languages"] == ["en", "fr"]
    assert both.meta["video_id"] == "YtkIWDE36qU"
    assert both.meta["licence"] == "CC-BY-3.0"
    minutes = both.text.split("\n\n")
    assert sorted(minutes[:2]) == ["English:\none", "French:\nun"]
    assert sorted(minutes[2:]) == ["English:\ntwo", "French:\ndeux"]
    assert documents[1].text == "German:\neins"


@given(st.sampled_from(sorted(FORMATS)), st.binary(max_size=60), st.integers(0, 200), st.integers(0, 30))
@settings(max_examples=200)
def test_damage_never_gets_out(name: str, noise: bytes, at: int, cut: int) -> None:
    damaged = FORMATS[name][:at] + noise + FORMATS[name][at + cut :]
    try:
        cues = read_captions(damaged).cues
    except ValueError:
        return
    assert all(cue.lines for cue in cues)


@pytest.mark.skipif(not (SAMPLES / "youtubesubtitles").exists(), reason="the shared raw samples are not here")
def test_samples() -> None:
    documents, refusals = extract_paths("youtubesubtitles", SAMPLES / "youtubesubtitles")
    assert refusals == []
    assert len(documents) == 4
    assert len(documents[-1].meta["languages"]) == 6
    films, _ = extract_paths("opensubtitles", SAMPLES / "opensubtitles")
    assert films[0].text.startswith('"When I get to heaven gonna sit down" "Walk right in')
    assert "<" not in films[0].text


def test_objects_of_the_transcript_package_are_read() -> None:
    cue = b'{"text":"Hi you","start":1.5,"duration":0.5}'
    found = read_captions(b'{"video_id":"x","language_code":"en","is_generated":true,"snippets":[' + cue + b"]}")
    assert [(c.start, c.end, c.lines) for c in found.cues] == [(1.5, 2.0, ["Hi you"])]
    assert (found.language, found.generated) == ("en", True)
    assert read_captions(b'{"dQw4w9WgXcQ":[' + cue + b"]}").cues == found.cues
    with pytest.raises(ValueError, match="no events"):
        read_captions(b'{"a":[],"b":[]}')


@pytest.mark.parametrize(
    "said",
    [
        *(
            "one  two",
            "It&amp;#39;s &amp;quot;so&amp;quot;",
            "a\nb",
            " ",
            "",
            "&lt;i&gt;x&lt;/i&gt; y",
            "{\\\\an8}up",
            "é\u3000ü",
        ),
        *("&#39;", "<b>x</b>", "&nbsp;", "]]>", "\x01", "&amp;lt;b&amp;gt;"),
    ],
)
def test_transcripts_without_a_tree_read_as_with_one(said: str) -> None:
    cue = f'<text start="61.5" dur="2.25">{said}</text><text start="3" dur="1">end</text>'
    plain, other = (f"<transcript{more}>{cue}</transcript>".encode() for more in ("", " a='1'"))
    assert plain_transcript(other) is None
    try:
        expected = read_captions(other)
    except ValueError:
        assert plain_transcript(plain) is None
        return
    assert read_captions(plain) == expected


def test_an_id_of_a_video_is_not_made_of_the_name_of_a_folder(tmp_path: Path) -> None:
    content = "1\n00:00:01,000 --> 00:00:02,000\nA line.\n"
    wanted = {
        "mathematics/english.srt": None,
        "binary-counting-machines/english.srt": None,
        "talk-YtkIWDE36qU/english.srt": None,
        "Talk [YtkIWDE36qU]/english.srt": "YtkIWDE36qU",
        "talk-YtkIWDE36qU.en.srt": "YtkIWDE36qU",
        "YtkIWDE36qU.en.srt": "YtkIWDE36qU",
        "mathematics.en.srt": None,
        "Mathematics.en.srt": None,
    }
    for number, (name, video) in enumerate(wanted.items()):
        path = tmp_path / str(number) / name
        path.parent.mkdir(parents=True)
        path.write_text(content)
        documents, _ = extract_paths("youtubesubtitles", tmp_path / str(number))
        assert documents[0].meta.get("video_id") == video, name
        assert ("url" in documents[0].meta) == (video is not None)
