r"""Whether a formula can be computed: an upper bound on its numbers, found by reading it and without computing it.

``\boxed{9^{9^{9}}}`` has 370 million digits. A computer algebra system would compute all digits, so
that a policy could stop a scorer with six characters. The bound covers sums, products, powers, factorials, binomials,
``\exp``, ``\sum`` and ``\prod``, in LaTeX and as plain text.

Owns: the limits on digits, nesting and length. Does not know: the value of a formula, sympy.
"""

from __future__ import annotations

import hashlib
import math
import re

MAX_DIGITS = 4000  # digits before and after the point; Python converts at most 4,300 digits to text
MAX_DEPTH = 12  # limit on nesting, because the time to simplify nested fractions doubles with each level
MAX_TOKENS = 1000
MAX_TERMS = 10_000  # terms of a sum or product with limits
MAX_POWER_OF_UNKNOWNS = 10_000

_TOKEN = re.compile(
    r"""
    (?P<number>(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+(?![\d.]))?)
    | \\(?:left|right|limits|displaystyle|quad|qquad|big|Big|[,;:! ])(?![A-Za-z])
    | (?P<command>\\[A-Za-z]+|\\.)
    | (?P<word>[A-Za-z]+)
    | (?P<mark>\*\*|!!|!=|[-+*/^_!(){}\[\]|]|\S)
    """,
    re.VERBOSE | re.DOTALL,
)
_OPENING = {
    "{": "}",
    "(": ")",
    "[": "]",
    r"\{": r"\}",
    r"\lfloor": r"\rfloor",
    r"\lceil": r"\rceil",
}
_CLOSING = frozenset(_OPENING.values())
_FRACTIONS = frozenset({r"\frac", r"\dfrac", r"\tfrac", r"\cfrac"})
_BINOMIALS = frozenset({r"\binom", r"\dbinom", r"\tbinom"})
_REPEATED = frozenset({r"\sum", r"\prod"})
_PRODUCTS = frozenset({"*", "/", r"\cdot", r"\times", r"\div"})
_SEPARATORS = frozenset({"+", "-", r"\pm", r"\mp", "=", "<", ">", ",", ";", "&", "!=", r"\\", r"\le", r"\leq", r"\ge"})
_SEPARATORS |= {r"\geq", r"\ne", r"\neq", r"\cup", r"\cap", r"\in", r"\to"}
_CONSTANTS = {
    "e": math.log10(math.e),
    "E": math.log10(math.e),
    r"\pi": math.log10(math.pi),
    r"\infty": 0.0,
}
_LOG10_E = math.log10(math.e)


class _TooLarge(Exception):
    """A formula beyond a limit."""


def is_computable(formula: str) -> bool:
    """Return whether all numbers that arise in a formula have at most MAX_DIGITS digits.

    Formulas that are nested deeper than MAX_DEPTH or have more than MAX_TOKENS tokens are not computable either.
    """
    tokens = []
    for found in _TOKEN.finditer(formula):
        if found.lastgroup:
            tokens.append((found.lastgroup, found[0]))
        if len(tokens) > MAX_TOKENS:
            return False
    reader = _Reader(tokens)
    try:
        while not reader.is_at_end():
            reader.sum_size()
            reader.next()  # a closing bracket without its opening one
    except _TooLarge:
        return False
    return True


def name_of(formula: str) -> str:
    """Return a name without digits for a formula that is too large. Formulas of equal text have equal names."""
    text = re.sub(r"\s|\\left|\\right|\\[,;:! ]", "", formula).replace("**", "^").replace("{", "(").replace("}", ")")
    digest = hashlib.sha256(text.encode(errors="replace")).digest()[:8]
    return "too large " + "".join("abcdefghijklmnop"[byte >> 4] + "abcdefghijklmnop"[byte & 15] for byte in digest)


class _Reader:
    """A recursive descent through the tokens of a formula.

    Every method that reads a part returns the part's size: an upper bound of log10 of its absolute value and of the
    inverse. Names of unknowns have size 0.
    """

    def __init__(self, tokens: list[tuple[str, str]]):
        self._tokens = tokens
        self._place = 0
        self._depth = 0
        self._has_unknowns = False

    def is_at_end(self) -> bool:
        return self._place >= len(self._tokens)

    def peek(self) -> str:
        return "" if self.is_at_end() else self._tokens[self._place][1]

    def next(self) -> tuple[str, str]:
        if self.is_at_end():
            return "mark", ""
        self._place += 1
        return self._tokens[self._place - 1]

    def sum_size(self, closing: str = "") -> float:
        """Read terms up to a closing bracket, ``closing`` or the end."""
        sizes = []
        while not self.is_at_end() and self.peek() not in _CLOSING and self.peek() != closing:
            if self.peek() in _SEPARATORS:
                self.next()
            else:
                sizes.append(self._product_size(closing))
        return _limited(max(sizes) + math.log10(len(sizes))) if sizes else 0.0

    def _product_size(self, closing: str) -> float:
        size = 0.0
        while not self.is_at_end():
            token = self.peek()
            if token in _CLOSING or token in _SEPARATORS or token == closing:
                break
            if token in _PRODUCTS:
                self.next()
            else:
                size = _limited(size + self._power_size())
        return size

    def _power_size(self) -> float:
        """Read an atom with its subscripts, factorials and exponents."""
        before = self._has_unknowns
        self._has_unknowns = False
        size = self._atom_size()
        has_unknowns = self._has_unknowns
        while self.peek() in ("^", "**", "_", "!", "!!"):
            mark = self.next()[1]
            if mark in ("^", "**"):
                size = _power(size, self._exponent_size(), has_unknowns)
            elif mark == "_":
                self._exponent_size()
            else:
                size = _factorial(size)
        self._has_unknowns = before or has_unknowns
        return size

    def _exponent_size(self) -> float:
        """Read an exponent or a subscript. For ``9^9^9`` the exponent is ``9^9``."""
        while self.peek() in ("-", "+", r"\pm"):
            self.next()
        if self.peek() == "^":
            return 0.0
        self._enter()
        size = self._power_size()
        self._depth -= 1
        return size

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooLarge

    def _atom_size(self) -> float:
        kind, text = self.next()
        if kind == "number":
            return _number(text)
        if text in _OPENING or text == "|":
            self._enter()
            size = self.sum_size(_OPENING.get(text, "|"))
            self.next()
            self._depth -= 1
            return size
        if text in _FRACTIONS:
            return _limited(self._argument_size() + self._argument_size())
        if text in _BINOMIALS:
            return _binomial(self._argument_size(), self._argument_size())
        if text in _REPEATED:
            return self._repeated_size(text)
        if text in (r"\exp", "exp"):
            return _limited(_LOG10_E * _value(self._argument_size()))
        if text in ("factorial", "gamma", r"\Gamma"):
            return _factorial(self._argument_size())
        if text == "binomial":
            return _binomial(self._argument_size(), 0.0)
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if kind == "command":
            return self._command_size()
        self._has_unknowns |= kind == "word"
        return 0.0

    def _command_size(self) -> float:
        r"""Read the contents of the brackets directly behind a command, such as the 3 and the 8 of ``\sqrt[3]{8}``."""
        sizes = [0.0]
        while self.peek() in ("{", "["):
            sizes.append(self._atom_size())
        return max(sizes)

    def _argument_size(self) -> float:
        self._enter()
        size = self._power_size()
        self._depth -= 1
        return size

    def _repeated_size(self, command: str) -> float:
        """Read a sum or product with its limits and the term that it repeats."""
        num_terms = 1.0
        while self.peek() in ("_", "^"):
            self.next()
            num_terms = max(num_terms, _value(self._atom_size()))
        if num_terms > MAX_TERMS:
            raise _TooLarge
        size = self._power_size() if self.peek() not in _CLOSING else 0.0
        return _limited(num_terms * size if command == r"\prod" else size + math.log10(num_terms))


def _limited(size: float) -> float:
    if size > MAX_DIGITS:
        raise _TooLarge
    return size


def _value(size: float) -> float:
    """Return the largest absolute value of a number of this size. More than 15 digits are too large."""
    if size > 15:
        raise _TooLarge
    return 10.0**size


def _number(text: str) -> float:
    """Return the size of a literal: its digits, more exactly if it is short."""
    mantissa, _, exponent = text.replace(",", "").lower().partition("e")
    if len(exponent) > 6:
        raise _TooLarge
    shift = int(exponent or 0)
    if len(mantissa) > 15:
        return _limited(len(mantissa) + abs(shift))
    value = float(mantissa)
    return _limited(abs(math.log10(value) + shift)) if value else 0.0


def _power(base: float, exponent: float, has_unknowns: bool) -> float:
    if base == 0.0 and not has_unknowns:  # 0, 1 and -1
        return 0.0
    largest = _value(exponent)
    if has_unknowns and largest > MAX_POWER_OF_UNKNOWNS:
        raise _TooLarge
    return _limited(base * largest)


def _factorial(size: float) -> float:
    n = _value(size)
    return _limited(n * math.log10(n)) if n > 2 else size


def _binomial(n_size: float, k_size: float) -> float:
    """Return the size of n over k, which is at most 2^n and at most n^k."""
    n = _value(n_size)
    k = _value(k_size)
    return _limited(min(n * math.log10(2.0), max(1.0, k) * n_size if k_size else n * math.log10(2.0)))
