"""A compiled scanner for plain HTML fragments: posts, comments and chapters.

It exists for speed alone: docs/LOG.md compares it with trees (lxml, lexbor) under the same writer. Callers ask for it
with `compiled=True`. It returns `None` for any markup it does not cover, which `formats/html/convert.py` then gives to
the tree; the text is the same either way.

`convert.py` is the entry, `scan.py` turns markup into text with marker bytes, `lines.py` turns that into lines,
`scripts.py` writes sub- and superscripts, `tables.py` holds lookup tables, `cache_key.py` the key of the compiled code.
"""
