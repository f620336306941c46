"""YouTube captions: the files of one video in several languages become one document, merged by the minute."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec

from piledriver.core.random import Stream
from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.subtitles.cues import Cue
from piledriver.corpus.formats.subtitles.formats import read_captions
from piledriver.corpus.formats.subtitles.languages import LANGUAGES, describe, video_id
from piledriver.corpus.raw.limits import damage_refusal, read_all
from piledriver.corpus.raw.partial_reads import DAMAGE
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with

MAX_FILE_BYTES = 1 << 25
# Files of one video are joined if no more than this lies between them in the input.
MAX_HELD_BYTES = 1 << 26
MAX_HELD_VIDEOS = 1000
_INFO = ".info.json"

CaptionData = tuple[str, str, str, bytes]


def _pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
    """Yield one piece for each video: its files, grouped by name and folder."""
    held: OrderedDict[str, list[CaptionData]] = OrderedDict()
    held_bytes = 0

    def let_go() -> Piece:
        nonlocal held_bytes
        video, files = held.popitem(last=False)
        size = sum(len(content) for *_, content in files)
        held_bytes -= size
        return Piece(files[0][0] if len(files) == 1 else video, length=size, extra=(video, files))

    for stream in streams:
        try:
            with stream.file as opened:
                content = read_all(opened, MAX_FILE_BYTES)
        except DAMAGE as error:
            yield damage_refusal(stream.origin, error)
            continue
        if stream.name.endswith(_INFO):
            video, caption = stream.origin.removesuffix(_INFO).replace("!", "/"), (stream.origin, _INFO, "", content)
        else:
            about = describe(stream.origin)
            video, caption = about.video, (stream.origin, about.language, about.label, content)
        held.setdefault(video, []).append(caption)
        held.move_to_end(video)
        held_bytes += len(content)
        while held_bytes > MAX_HELD_BYTES or len(held) > MAX_HELD_VIDEOS:
            yield let_go()
    while held:
        yield let_go()


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield the captions of one video."""
    video, files = piece.extra
    tracks: dict[str, list[Cue]] = {}
    languages: list[str] = []
    generated = False
    told: dict[str, Any] = {}
    for origin, language, label, content in files:
        if language == _INFO:
            told = _told(content)
            continue
        try:
            captions = read_captions(content)
        except ValueError as error:
            yield Refusal("no timed text", origin, str(error))
            continue
        if not captions.cues:
            yield Refusal("no captions", origin)
            continue
        code = language or captions.language
        name = label or LANGUAGES.get(code.split("-")[0].lower(), code) or "Captions"
        if name in tracks:
            name = f"{name} ({code or len(tracks) + 1})"
        if name in tracks:
            yield Refusal("captions of this language twice", origin, name)
            continue
        tracks[name] = captions.cues
        languages.append(code or "und")
        generated = generated or captions.generated
    if not tracks:
        return
    meta: dict[str, Any] = {"origin": piece.origin, "languages": languages, "generated": generated}
    meta |= {key: value for key, value in told.items() if value}
    of_file = not files[0][0].replace("!", "/").startswith(f"{video}/")
    if (number := told.get("video_id") or video_id(video, of_file=of_file)) is not None:
        meta["video_id"] = number
        meta["url"] = f"https://www.youtube.com/watch?v={number}"
    yield Document(_merged(tracks, video), meta=meta)


def _told(content: bytes) -> dict[str, Any]:
    """Return the metadata of the description that yt-dlp writes beside the captions."""
    try:
        info = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError):
        return {}
    if not isinstance(info, dict):
        return {}
    fields = {"id": "video_id", "title": "title", "channel": "channel", "upload_date": "date", "license": "licence"}
    told = {ours: info[theirs] for theirs, ours in fields.items() if isinstance(info.get(theirs), str)}
    if told.get("licence", "").startswith("Creative Commons Attribution"):
        told["licence"] = "CC-BY-3.0"
    return told


def _merged(tracks: dict[str, list[Cue]], video: str) -> str:
    """Return the languages minute by minute; their order is shuffled in each minute so that none always leads."""
    minutes: dict[int, dict[str, list[str]]] = {}
    for name, cues in tracks.items():
        for cue in cues:
            minutes.setdefault(int(cue.end // 60), {}).setdefault(name, []).extend(cue.lines)
    if len(tracks) == 1:
        lines = [line for minute in sorted(minutes) for lines in minutes[minute].values() for line in lines]
        return "\n".join(lines if "Captions" in tracks else [f"{next(iter(tracks))}:", *lines])
    order = Stream(0, "youtube captions", video)
    blocks: list[str] = []
    for minute in sorted(minutes):
        for name in order.child(minute).shuffled(list(minutes[minute])):
            blocks.append(f"{name}:\n" + "\n".join(minutes[minute][name]))
    return "\n\n".join(blocks)


SOURCE = Source(
    slug="youtubesubtitles",
    name="YoutubeSubtitles",
    title="captions of YouTube videos, in several languages side by side",
    raw_format="WebVTT, srt, sbv, YouTube's timed text as XML (srv1, srv2, srv3), JSON (json3) and TTML",
    licence="none: not allowed by YouTube's terms, unless the video's own licence says otherwise",
    consent="none",
    treatment=(
        "The files of one video are told together by name (`Title [id].en.vtt`) or folder (`video/english.srt`) "
        "and become one document. Cues are put into minutes by their end; in each minute the lines of each "
        "language stand under its name, in an order that is shuffled anew each minute by the video's name; with "
        "one language its name stands once. Lines of captions that roll up appear once. The original took captions "
        "written by people only; files cannot always tell, so that generated ones are kept and marked `generated` "
        "where the format shows it. The title, channel, date and licence come from the .info.json that yt-dlp "
        "writes beside the captions, where there is one."
    ),
    citation="The Pile, arXiv:2101.00027, section 2.19",
    wants=ends_with(".vtt", ".srt", ".sbv", ".ttml", ".srv1", ".srv2", ".srv3", ".json3", ".json", ".xml"),
    pieces=_pieces,
    documents=_documents,
)
