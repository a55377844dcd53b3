r"""Reduce a text to plain characters: one form for each digit, minus sign and quotation mark, and no LaTeX styles.

    plain      typographic variants of characters become one form, mostly ASCII
    unstyled   plain, without the styles of LaTeX and Markdown: ``\textbf{5}``, ``\left(``, ``**5**``
    flat       unstyled, with numeric fractions, degrees and multiplication signs as plain text: ``\frac{1}{2}`` is 1/2
    peeled     without the delimiters, quotation marks and the full stop around a text

Every function takes time linear in the length of the text.
"""

from __future__ import annotations

import re
import unicodedata

_MINUS_SIGNS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"  # without the em dash, which separates parts of a sentence
_REPLACED = {
    **dict.fromkeys(_MINUS_SIGNS, "-"),
    **dict.fromkeys("\u2018\u2019\u201a\u201b\u02bc\u02b9\u2032\u00b4\uff07", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033\uff02", '"'),
    **dict.fromkeys("\u00d7\u00b7\u2217\u22c5\u2219", "*"),
    **dict.fromkeys("\u00f7\u2215\u2044", "/"),
    "\u066a": "%",
    "\u066b": ".",  # Arabic decimal separator
    "\u066c": ",",  # Arabic thousands separator
    "\u060c": ",",
    "\u06d4": ".",
    "\u3002": ".",
}


class _Characters(dict):
    """Replacement of each character by code point, filled when a character is first seen."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        replacement = _REPLACED.get(character, character)
        if unicodedata.decimal(character, None) is not None:
            replacement = str(unicodedata.decimal(character))
        elif unicodedata.category(character) == "Cf":  # zero-width spaces and joiners, soft hyphens, marks of direction
            replacement = ""
        self[code] = replacement
        return replacement


_CHARACTERS = _Characters()
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_LOWERED = re.compile("[\u2080-\u2089]+")
# Spaces that typesetters put between groups of three digits.
_THIN_GROUPS = re.compile("(?<![0-9.,'])[0-9]{1,3}(?:[\u00a0\u2007\u2008\u2009\u200a\u202f][0-9]{3}(?![0-9]))+")
_THIN = re.compile("[\u00a0\u2007\u2008\u2009\u200a\u202f]")


def plain(text: str) -> str:
    """Return the text with typographic variants of characters replaced by one form (mostly ASCII)."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda found: f"^{{{_compatible(found[0])}}}", text)
    text = _LOWERED.sub(lambda found: f"_{{{_compatible(found[0])}}}", text)
    text = _VULGAR.sub(lambda found: " " + _compatible(found[0]), text)
    text = text.translate(_CHARACTERS)
    text = _THIN_GROUPS.sub(lambda found: _THIN.sub("'", found[0]), text)
    return unicodedata.normalize("NFKC", text).translate(_CHARACTERS)


def _compatible(characters: str) -> str:
    return unicodedata.normalize("NFKC", characters).translate(_CHARACTERS)


_STYLES = (
    r"textbf|textit|textrm|textsf|texttt|textnormal|text|mathbf|mathrm|mathit|mathsf|mathtt|mathord|bm|boldsymbol|pmb"
    r"|emph|underline|operatorname|mbox|hbox|ensuremath|boxed|fbox"
)
_COLORED = r"\\(?:textcolor|colorbox)\s{0,9}\{[^{}]{0,99}\}\s{0,9}\{"
_GROUP = re.compile(rf"\\(?:{_STYLES})\s{{0,9}}\{{|{_COLORED}|\\\\|\\[{{}}]|[{{}}]")
_COLOR = re.compile(r"\\color\s{0,9}(?:\[[^\[\]{}]{0,99}\])?\s{0,9}\{[^{}]{0,99}\}")
_SWITCHES = re.compile(
    r"\\(?:displaystyle|textstyle|bfseries|bf|rm|it|large|Large|huge|left|right|limits)(?![A-Za-z])|\\!"
)
_LATEX_THIN = re.compile(r"(?<=[0-9])(?:\\[,;: !]|~|\{,\}|\\thinspace(?![A-Za-z]))(?=[0-9]{3}(?![0-9]))")
LATEX_SPACE = re.compile(r"\\[,;: !]|~|\\(?:q?quad|thinspace|enspace|medspace)(?![A-Za-z])")
_DEGREE = re.compile(r"\^\s?\{\s?\\circ\s?\}|\^\s?\\circ(?![A-Za-z])|\\(?:degree|textdegree)(?![A-Za-z])(?:\{\})?")
_NUMERIC_FRACTION = re.compile(
    r"([0-9])?\s?\\[dtc]?frac\s?(?:\{\s?(-?)\s?([0-9.,']+)\s?\}|([0-9]))\s?(?:\{\s?(-?)\s?([0-9.,']+)\s?\}|([0-9]))"
)
_COMMAND_END = re.compile(r"\\[A-Za-z]+$")
_ORDINAL = re.compile(r"(?<=[0-9])\s?\^\s?\{?\s?(st|nd|rd|th)\s?\}?")
_BOLD = re.compile(r"(?<![0-9A-Za-z)\]}*])\*\*(?!\*)|\*\*(?![0-9A-Za-z(\[{*.-])")  # keep "2**3", which is a power
_TIMES = re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])")
_ESCAPED = re.compile(r"\\([$%&#_€£])")


def unstyled(text: str) -> str:
    r"""Return the text without styles, which only change its looks: ``\textbf{5}``, ``\color{red}5``, ``\left(``."""
    text = plain(text)
    if "\\" in text:
        text = _without_groups(_SWITCHES.sub("", _COLOR.sub("", text)))
    text = _LATEX_THIN.sub("'", text)
    return _BOLD.sub(" ", text)


def _without_groups(text: str) -> str:
    r"""Remove ``\textbf{`` and the like with their closing braces, in one pass."""
    if not re.search(rf"\\(?:{_STYLES}|textcolor|colorbox)\b", text):
        return text
    pieces: list[str] = []
    dropped: list[bool] = []
    end = 0
    for token in _GROUP.finditer(text):
        pieces.append(text[end : token.start()])
        end = token.end()
        said = token[0]
        if len(said) > 2:
            dropped.append(True)
            if _COMMAND_END.search(pieces[-1][-20:]):
                pieces.append(" ")  # keep \circ\text{C} apart, because \circC is another command
            continue
        if said == "{":
            dropped.append(False)
        elif said == "}" and dropped and dropped.pop():
            continue
        pieces.append(said)
    pieces.append(text[end:])
    return "".join(pieces)


def flat(text: str) -> str:
    """Return a text in which numbers, fractions, powers of ten, degrees and units stand as plain text."""
    text = _ORDINAL.sub(r"\1", unstyled(text))
    if "\\" in text or "~" in text:
        text = _DEGREE.sub("\u00b0", text)
        text = _NUMERIC_FRACTION.sub(_as_plain_fraction, text)
        text = LATEX_SPACE.sub(" ", _TIMES.sub("*", text))
        text = _ESCAPED.sub(r"\1", text)
    return text


def _as_plain_fraction(found: re.Match) -> str:
    before, sign, numerator, digit, other_sign, denominator, other_digit = found.groups()
    minus = "-" if (sign or "") != (other_sign or "") else ""
    whole = f"{before} " if before else ""
    return f"{whole}{minus}{numerator or digit}/{denominator or other_digit}"


_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"))


def peeled(text: str) -> str:
    """Return an answer without the delimiters, quotation marks and the full stop around it."""
    for _ in range(4):
        before = text
        text = text.strip(" \t\r\n*`\"'").removesuffix(r"\\")
        if text.endswith((".", ",", ";", ":")) and not text.endswith(".."):
            text = text[:-1]
        for left, right in _DELIMITERS:
            if text.startswith(left) and text.endswith(right) and len(text) >= len(left) + len(right):
                inside = text[len(left) : len(text) - len(right)]
                if left in inside or right in inside:
                    continue
                text = inside
        if text == before:
            break
    return text
