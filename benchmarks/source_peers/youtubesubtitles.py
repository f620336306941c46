"""The usual Python readers of captions: webvtt-py and pysrt."""


def peer(content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    if text.startswith("WEBVTT"):
        import io

        import webvtt

        return "\n".join(caption.text for caption in webvtt.from_buffer(io.StringIO(text)))
    import pysrt

    return "\n".join(item.text for item in pysrt.from_string(text))


CASES = ["youtubesubtitles/moser/english.srt", "youtubesubtitles/binary-counting/tamil_community.srt"]
