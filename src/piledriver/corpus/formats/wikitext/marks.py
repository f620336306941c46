"""Control characters by which the steps of the conversion mark text for each other; they are removed from the input.

`str.strip` and `str.split` do not take any of them for white space.
"""

PUT_ASIDE_START, PUT_ASIDE_END = "\x10", "\x11"
VANISHED = "\x02"
"""The gap of removed markup; the punctuation around it may have to be removed as well."""
LINE_BREAK = "\x0e"
"""A deliberate line break (`<br>`, poems), unlike the one in the middle of a paragraph."""
EQUALS = "\x12"
"""An equals sign that does not name an argument (`{{=}}`)."""
CELL = "\x0f"
"""The start of a cell of an HTML table."""
