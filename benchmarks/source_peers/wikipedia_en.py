"""What the original used for Wikipedia: mwparserfromhell."""


def peer(content: bytes) -> str:
    import mwparserfromhell

    return mwparserfromhell.parse(content.decode("utf-8", "replace")).strip_code()


CASES = [
    "wikipedia-en/wikitext/United-Kingdom.txt",
    "wikipedia-en/wikitext/Mozilla-Firefox.txt",
    "wikipedia-en/wikitext/Bodmin.txt",
    "wikipedia-en/wikitext/washington-nationals.txt",
    "wikipedia-en/wikitext/toronto_star.txt",
    "wikipedia-en/wikitext/Elizabeth-Gilbert.txt",
]
