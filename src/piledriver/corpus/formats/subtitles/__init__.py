"""Subtitles and captions: files of timed text to cues, and cues to text."""
