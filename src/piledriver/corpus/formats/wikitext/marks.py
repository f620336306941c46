"""Control characters that the steps of the conversion leave for each other; the input has none of them any more.

None of them is white space to `str.strip` and `str.split`, so that they survive those.
"""

PUT_ASIDE_START, PUT_ASIDE_END = "\x10", "\x11"
VANISHED = "\x02"
"""Something stood here that says nothing in plain text; the punctuation around it may have to go as well."""
LINE_BREAK = "\x0e"
"""A line break that was meant (`<br>`, poems), unlike the one in the middle of a paragraph."""
EQUALS = "\x12"
"""An equals sign that does not name an argument (`{{=}}`)."""
CELL = "\x0f"
"""A cell of an HTML table starts."""
