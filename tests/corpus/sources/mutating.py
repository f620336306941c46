"""Valid raw input with parts cut out, doubled or replaced by junk: what the fuzz tests feed to the parsers."""

from __future__ import annotations

from hypothesis import strategies as st


def mutations(valid: bytes) -> st.SearchStrategy[bytes]:
    """Some edits of a valid file, or bytes that were never one."""

    @st.composite
    def edited(draw: st.DrawFn) -> bytes:
        content = valid
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.integers(0, len(content)))
            end = min(len(content), at + draw(st.integers(0, 40)))
            kind = draw(st.sampled_from(("cut", "double", "junk")))
            middle = b"" if kind == "cut" else content[at:end] * 2 if kind == "double" else draw(st.binary(max_size=12))
            content = content[:at] + middle + content[end:]
        return content

    return edited() | st.binary(max_size=200)
