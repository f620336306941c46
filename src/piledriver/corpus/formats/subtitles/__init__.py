"""Subtitles and captions: parse files of timed text to cues, and write cues as text."""
