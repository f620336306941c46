"""What commands stand for in text: symbols, letters, accents. Tables only."""

from __future__ import annotations

import unicodedata

SYMBOLS = {
    "\\ ": " ", "\\\n": " ", "\\\t": " ", "\\,": " ", "\\;": " ", "\\:": " ", "\\>": " ", "\\!": "", "\\/": "",
    "\\-": "",
    "\\@": "", "\\space": " ", "\\quad": " ", "\\qquad": " ", "\\enspace": " ", "\\thinspace": " ",
    "\\nobreakspace": " ",
    "\\&": "&", "\\%": "%", "\\$": "$", "\\#": "#", "\\_": "_", "\\{": "{", "\\}": "}", "\\|": "‖",
    "\\ldots": "…", "\\dots": "…", "\\textellipsis": "…", "\\cdots": "⋯", "\\dotfill": " ", "\\hrulefill": " ",
    "\\ss": "ß", "\\SS": "SS", "\\ae": "æ", "\\AE": "Æ", "\\oe": "œ", "\\OE": "Œ", "\\aa": "å", "\\AA": "Å", "\\o": "ø",
    "\\O": "Ø", "\\l": "ł", "\\L": "Ł", "\\i": "ı", "\\j": "ȷ", "\\dh": "ð", "\\DH": "Ð", "\\th": "þ", "\\TH": "Þ",
    "\\dj": "đ", "\\DJ": "Đ", "\\ng": "ŋ", "\\NG": "Ŋ", "\\S": "§", "\\P": "¶", "\\dag": "†", "\\ddag": "‡",
    "\\textdagger": "†", "\\textdaggerdbl": "‡", "\\copyright": "©", "\\textcopyright": "©", "\\textregistered": "®",
    "\\texttrademark": "™", "\\pounds": "£", "\\textsterling": "£", "\\euro": "€", "\\texteuro": "€", "\\EUR": "€",
    "\\textyen": "¥", "\\textcent": "¢", "\\textdegree": "°", "\\degree": "°", "\\degrees": "°", "\\textmu": "µ",
    "\\textohm": "Ω", "\\textbackslash": "\\", "\\textasciitilde": "~", "\\textasciicircum": "^", "\\textbar": "|",
    "\\textless": "<", "\\textgreater": ">", "\\textunderscore": "_", "\\textbraceleft": "{", "\\textbraceright": "}",
    "\\textbullet": "•", "\\bullet": "•", "\\textendash": "–", "\\textemdash": "—", "\\textquoteleft": "‘",
    "\\textquoteright": "’", "\\textquotedblleft": "“", "\\textquotedblright": "”", "\\textquotesingle": "'",
    "\\guillemotleft": "«", "\\guillemotright": "»", "\\og": "« ", "\\fg": " »", "\\glqq": "„", "\\grqq": "“",
    "\\lq": "‘",
    "\\rq": "’", "\\textexclamdown": "¡", "\\textquestiondown": "¿", "\\textperiodcentered": "·", "\\slash": "/",
    "\\textasteriskcentered": "*", "\\textpm": "±", "\\texttimes": "×", "\\textdiv": "÷", "\\textonehalf": "½",
    "\\textonequarter": "¼", "\\textthreequarters": "¾", "\\textordfeminine": "ª", "\\textordmasculine": "º",
    "\\textmd": "", "\\checkmark": "✓", "\\cmark": "✓", "\\xmark": "✗", "\\qed": "∎", "\\qedhere": "",
    "\\qedsymbol": "∎",
    "\\TeX": "TeX", "\\LaTeX": "LaTeX", "\\LaTeXe": "LaTeX2e", "\\BibTeX": "BibTeX", "\\AmS": "AMS", "\\etal": "et al.",
    "\\textrightarrow": "→", "\\textleftarrow": "←", "\\rightarrow": "→", "\\leftarrow": "←", "\\Rightarrow": "⇒",
    "\\to": "→", "\\times": "×", "\\pm": "±", "\\sim": "∼", "\\approx": "≈", "\\leq": "≤", "\\geq": "≥", "\\cdot": "·",
    "\\textsuperscript*": "", "\\lbrack": "[", "\\rbrack": "]", "\\lbrace": "{", "\\rbrace": "}",
    "\\textvisiblespace": " ",
    "\\textnumero": "№", "\\textregisteredsign": "®", "\\textalpha": "α", "\\textbeta": "β", "\\textgamma": "γ",
    "\\sep": ", ", "\\and": ", ", "\\leavevmode": "", "\\null": "", "\\bibnamedelima": " ", "\\bibnamedelimb": " ",
    "\\bibrangedash": "–",
    "\\cdash": "–", "\\adddot": ".", "\\natexlab": "",
    "\\textquotedbl": '"', "\\dq": '"', "\\lstinline": "",
}  # fmt: skip

_COMBINING = {
    "`": "\u0300", "'": "\u0301", "^": "\u0302", "~": "\u0303", '"': "\u0308", "=": "\u0304", ".": "\u0307",
    "u": "\u0306", "v": "\u030c", "H": "\u030b", "r": "\u030a", "c": "\u0327", "k": "\u0328", "d": "\u0323",
    "b": "\u0331", "t": "\u0361", "G": "\u030f", "U": "\u030e",
}  # fmt: skip
ACCENTS = frozenset(f"\\{mark}" for mark in _COMBINING)
# Commands of one letter mean an accent only with a letter behind them.


def accented(command: str, base: str) -> str:
    r"""A letter with its accent; an accent over nothing is left out.

    >>> accented("\\'", "e"), accented("\\c", "c"), accented('\\"', "ı")
    ('é', 'ç', 'ï')
    """
    if not base:
        return ""
    first = {"ı": "i", "ȷ": "j"}.get(base[0], base[0])
    if not first.isalpha():
        return base
    return unicodedata.normalize("NFC", first + _COMBINING[command[1]]) + base[1:]


UNITS = {
    "meter": "m", "metre": "m", "second": "s", "kilogram": "kg", "gram": "g", "kelvin": "K", "ampere": "A",
    "mole": "mol",
    "candela": "cd", "hertz": "Hz", "newton": "N", "pascal": "Pa", "joule": "J", "watt": "W", "volt": "V", "ohm": "Ω",
    "farad": "F", "henry": "H", "tesla": "T", "weber": "Wb", "lumen": "lm", "lux": "lx", "liter": "L", "litre": "L",
    "minute": "min", "hour": "h", "day": "d", "degree": "°", "celsius": "°C", "degreeCelsius": "°C", "percent": "%",
    "electronvolt": "eV", "eV": "eV", "bar": "bar", "angstrom": "Å", "byte": "B", "bit": "bit", "decibel": "dB",
    "radian": "rad", "steradian": "sr", "barn": "b", "dalton": "Da", "kilo": "k", "mega": "M", "giga": "G", "tera": "T",
    "peta": "P", "milli": "m", "micro": "µ", "nano": "n", "pico": "p", "femto": "f", "centi": "c", "deci": "d",
    "hecto": "h",
    "per": "/", "squared": "²", "cubed": "³", "square": "", "cubic": "", "of": "", "micron": "µm", "coulomb": "C",
    "becquerel": "Bq", "sievert": "Sv", "gray": "Gy", "m": "m", "s": "s", "kg": "kg", "nm": "nm", "mm": "mm",
    "cm": "cm",
    "km": "km", "um": "µm", "ms": "ms", "us": "µs", "ns": "ns", "GHz": "GHz", "MHz": "MHz", "kHz": "kHz", "Hz": "Hz",
    "V": "V", "mV": "mV", "mA": "mA", "A": "A", "W": "W", "K": "K", "keV": "keV", "MeV": "MeV", "GeV": "GeV",
    "TeV": "TeV",
}  # fmt: skip
