"""Read a number with its sign, its unit and the words around it.

"." is the decimal point. "," groups digits by three, or by two and three as in India; spaces and apostrophes group them
by three. A comma is a decimal comma only after groups ("1.234,56"); "3,5" and "0,5" could be pairs, so they are no
numbers. Values are exact fractions.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from jaxrl_llm.scoring.typography import flat, peeled

MAX_NUMBER_CHARS = 2000  # Python refuses to read integers of more than 4,300 digits

_RUN = r"[0-9]+(?:[.,'][0-9]+)*"
_EXPONENT = r"(?:\{\s?[-+]?\s?[0-9]{1,3}\s?\}|[-+]?[0-9]{1,3}(?![0-9]))"
NUMBER = re.compile(
    rf"""
    (?P<mixed> (?<![0-9.,'/])[0-9]{{1,9}}[ ][0-9]{{1,9}}/[0-9]{{1,9}}(?![/0-9]) )
    | (?P<fraction> (?<![0-9.,'/]){_RUN}/{_RUN}(?![/0-9]) )
    | (?P<power> (?<![0-9.,'])10\s?(?:\^|\*\*)\s?{_EXPONENT} )
    | (?<!\^)(?<!\^\{{)(?<!_)(?<!_\{{) (?P<digits> {_RUN} | (?<![\w.])\.{_RUN} )
      (?P<scale> [eE][-+]?[0-9]{{1,3}}(?!\w|\.[0-9]) | \s?[*xX]\s?10\s?(?:\^|\*\*)\s?{_EXPONENT} )?
    """,
    re.X,
)
# Each form of a numeral, and which characters of it group digits.
_GROUPED = (
    (re.compile(r"[0-9]*(?:\.[0-9]+)?"), ""),
    (re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?"), ","),
    (re.compile(r"[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?:\.[0-9]+)?"), ","),  # India
    # Groups as in Switzerland; thin spaces were already replaced by apostrophes.
    (re.compile(r"[0-9]{1,3}(?:'[0-9]{3})+(?:[.,][0-9]+)?"), "'"),
    (re.compile(r"[0-9]{1,3}(?:\.[0-9]{3}){2,}(?:,[0-9]+)?"), "."),
    (re.compile(r"[0-9]{1,3}\.[0-9]{3},[0-9]+"), "."),
)
_BASE_TEN = re.compile(r"_\{?10\}?$")
_SPACED = re.compile(r"(?<![0-9.,'])[0-9]{1,3}(?: [0-9]{3}(?![0-9]))+")  # accepted only in a marked answer

# Words that scale the number before them.
_MULTIPLIERS = {
    **dict.fromkeys(("hundred", "hundreds"), 10**2),
    **dict.fromkeys(("thousand", "thousands", "tausend", "mille", "mil", "千"), 10**3),
    **dict.fromkeys(("万", "萬"), 10**4),
    **dict.fromkeys(("lakh", "lakhs"), 10**5),
    **dict.fromkeys(("million", "millions", "millionen", "millones"), 10**6),
    **dict.fromkeys(("crore", "crores"), 10**7),
    **dict.fromkeys(("亿", "億"), 10**8),
    **dict.fromkeys(("billion", "billions"), 10**9),
    **dict.fromkeys(("trillion", "trillions"), 10**12),
    "dozen": 12,
}
# Each row has the name of a unit, then its other names. If both numbers have known units, the units must be equal.
_UNITS = """
    % percent pct percentage|$ usd dollar dollars|€ eur euro euros|£ gbp|¥ jpy yen 円|₹ inr rupee rupees|元 yuan cny rmb
    ¢ cent cents|mph|km/h kmh kph
    km kilometer kilometers kilometre kilometres|m meter meters metre metres|mm millimeter millimeters millimetre
    cm centimeter centimeters centimetre centimetres|mi mile miles|ft foot feet|inch inches|yd yard yards
    kg kilogram kilograms|g gram grams|mg milligram milligrams|lb lbs|oz ounce ounces|ton tons tonne tonnes
    l liter liters litre litres|ml milliliter milliliters millilitre millilitres
    ms millisecond milliseconds|s sec secs second seconds|min mins minute minutes|h hr hrs hour hours
    day days|week weeks|month months|year years
    n newton newtons|j joule joules|kj|w watt watts|kw|v volt volts|hz|khz|mhz|ghz|pa|kpa|mol|k kelvin
    °c celsius|°f fahrenheit|rad radian radians|kb|mb|gb|tb
"""
_KNOWN_UNITS = {
    name: names.split()[0]
    for line in _UNITS.strip().splitlines()
    for names in line.strip().split("|")
    for name in names.split()
}
# Single letters that mean a unit, or the word "a", more often than an unknown.
_SINGLE_UNITS = frozenset("mgshlLVANJWKCFa")
_NO_UNITS = frozenset(
    {"and", "or", "not", "nor", "no", "never", "to", "half", "infinity", "over", "divided", "multiplied"}
)
_NO_UNITS |= {"pi", "e", "i", "sqrt", "root", "log", "ln", "exp", "sin", "cos", "tan", "mod", "plus", "minus"}
_NO_UNITS |= {"nicht", "kein", "oder", "und", "ou", "pas", "et", "y", "o", "u"}
_CURRENCY = r"(?:US\$|USD|EUR|GBP|[$€£¥₹₽₩¢])"
_HEAD = re.compile(rf"(?P<sign>[-+]\s?|minus\s|negative\s)?(?P<currency>{_CURRENCY}\s?)?(?P<second>-)?")
_UNIT_WORD = re.compile(r"([^\W\d_]+)(?:\^\s?\{?\s?([0-9])\s?\}?)?")
_UNIT_SIGN = re.compile(r"(°[CF]?(?![A-Za-z])|[%/$€£¥₹₽₩¢])")
MAX_UNIT_WORDS = 8
_SCRIPT = re.compile(r"\s?\^|_")
_MINUS_WORD = re.compile(r"(?<![^\W\d_])(?:minus|negative)\s$", re.I)
_UNIT_POWER = re.compile(r"(?<=[a-z])\^\s?\{?[23]\}?")
_LETTERS = re.compile(r"[^\W\d_]+")
_SIGN_OR_CURRENCY = re.compile(rf"\s?-?\s?{_CURRENCY}?\s?-?$")
_OPERATOR = re.compile(r"[+*/^<>!\\{}|~_#&]")
_UNIT_IN_PROSE = re.compile(
    r"\s?(%|°\s?[CF]?|[$€£¥₹]|[千万萬亿億]|[A-Za-z]{1,11}(?:\^\{?[23]\}?)?(?:/[A-Za-z]{1,11})?(?![A-Za-z]))"
)
_OPERAND = re.compile(r"[0-9A-Za-z\u00c0-\u024f\u0370-\u052f)\]}]")  # after such a character a minus is a subtraction
_VERBS = r"is|are|was|be|equals|equal to|gets?|got|gives?|ist|sind|est|es|son|é"
# Texts after which "- 5" is a negative number, although a space follows the minus.
_BEFORE_SIGN = re.compile(rf"(?:^|[=:(\[{{,$]|[是为為は]|(?<![^\W\d_])(?:{_VERBS}|to|of))$", re.I)
# Texts before a number that is the statement of a sentence: "It is 72", "It costs $5", not "Paris, 75001".
_BEFORE_NUMBER = re.compile(
    rf"(?:[=:]|[是为為は]|(?<![^\W\d_])(?:{_VERBS}|costs?|pays?|has|have|had|makes?|made|about|only|exactly|approximately"
    r"|roughly|answer|total|result|sum))$",
    re.I,
)
_LISTED = re.compile(r"[,;&]|(?<![^\W\d_])(?:and|or|und|oder|et|ou|y|o)(?![^\W\d_])", re.I)
_SEPARATOR = re.compile(r"[,;\s\])}*_]+")
_GRADE = re.compile(
    r"([0-9]{1,9}(?:[.,][0-9]{1,9})?)(?:[eE]([-+]?[0-9]{1,2})(?![\w]))?"
    r"(?:\s?(?:/|out of|von|sur|de)\s?([0-9]{1,4}(?:\.[0-9]{1,4})?))?(?!\s?[-/][0-9]|[0-9A-Za-z]|[.,][0-9])"
)


class Quantity(NamedTuple):
    """A number that was read from a text.

    Attributes:
        value: the exact value.
        unit: the canonical name of a known unit, "" for no unit or an unknown one.
        digits: the numeral without groups, with its sign ("-007.50"); "" if the value took more than digits.
    """

    value: Fraction
    unit: str
    digits: str


def quantity(answer: str) -> Quantity | None:
    """Read an answer that is one number, perhaps with a currency, a unit or a name ("x = 5 km"); else None."""
    if len(answer) > MAX_NUMBER_CHARS:
        return None
    text = peeled(flat(answer))
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    left, equals, right = text.replace("\u2248", "=").replace(r"\approx", "=").rpartition("=")
    if equals:
        if left.endswith(("<", ">", "!", r"\not")) or _LISTED.search(left):
            return None
        text = right.strip()
    text = _BASE_TEN.sub("", text)
    text = _SPACED.sub(lambda found: found[0].replace(" ", "'"), text)
    head = _HEAD.match(text)
    number = None if head is None else NUMBER.match(text, head.end())
    if head is None or number is None:
        return None
    is_negative = (head["sign"] or "+")[0] in "-mn" or bool(head["second"])
    beside = text[number.end() :]
    if head["currency"]:
        beside = f" {head['currency']} {beside}"
    unit = _unit(beside)
    return None if unit is None else _quantity(number, is_negative, *unit)


def _quantity(number: re.Match, is_negative: bool, unit: str, multiplier: int = 1) -> Quantity | None:
    """Return the number that was matched with its sign; None if its digits are grouped in no known way."""
    digits = digits_of(number["digits"]) if number["digits"] else None
    value = _value(number)
    if value is None:
        return None
    is_plain = digits is not None and not number["scale"] and multiplier == 1
    sign = "-" if is_negative else ""
    return Quantity(
        (-value if is_negative else value) * multiplier,
        unit,
        sign + digits if is_plain else "",
    )


def _value(number: re.Match) -> Fraction | None:
    if number["mixed"]:
        whole, part = number["mixed"].split(" ")
        numerator, denominator = map(int, part.split("/"))
        return Fraction(int(whole) * denominator + numerator, denominator) if numerator < denominator else None
    if number["fraction"]:
        numerator, denominator = map(digits_of, number["fraction"].split("/"))
        if not numerator or not denominator or not Fraction(denominator):
            return None
        return Fraction(numerator) / Fraction(denominator)
    if number["power"]:
        return Fraction(10) ** _exponent(number["power"])
    digits = digits_of(number["digits"])
    if digits is None:
        return None
    exponent = _exponent(number["scale"]) if number["scale"] else 0
    return Fraction(digits) * Fraction(10) ** exponent


def _exponent(power: str) -> int:
    """Return the exponent of a power of ten: "10^{3}", "e3", "10**3"."""
    digits = re.split(r"[eE^]|\*\*", power)[-1]
    return int(digits.strip("{} ").replace(" ", ""))


def digits_of(numeral: str) -> str | None:
    """Return a numeral without the characters that group its digits; None if the groups are of no known form."""
    if len(numeral) > MAX_NUMBER_CHARS:
        return None
    for form, group in _GROUPED:
        if form.fullmatch(numeral):
            return numeral.replace(group, "").replace(",", ".") if group else numeral
    return None


def _unit(rest: str) -> tuple[str, int] | None:
    """Read the text around a number as (unit, multiplier); None if the text is not only a unit."""
    parts = [part.strip(".,") for part in _UNIT_SIGN.sub(r" \1 ", rest).split()]
    if len(parts) > MAX_UNIT_WORDS:
        return None
    is_attached = bool(rest) and not rest[0].isspace()
    name = ""
    multiplier = 1
    for i, part in enumerate(parts):
        lower = part.casefold().replace(" ", "")
        word_match = _UNIT_WORD.fullmatch(part)
        if lower in _MULTIPLIERS:
            multiplier *= _MULTIPLIERS[lower]
        elif lower in ("/", "per"):
            name += "/"
        elif _UNIT_SIGN.fullmatch(part) or lower in ("degree", "degrees"):
            name += _KNOWN_UNITS.get(lower, "")
        elif word_match and _is_unit_word(word_match[1], is_attached and i == 0):
            name += _KNOWN_UNITS.get(word_match[1].casefold(), "?") + (word_match[2] or "")
        else:
            return None
    return ("" if "?" in name else name), multiplier


def _is_unit_word(word: str, is_attached: bool) -> bool:
    """Return whether a word next to a number may be its unit: "5 apples", "5km" and "5个", not "5x" or "5 or"."""
    if not word.isascii():
        return not _is_symbol(word)
    if is_attached:
        return len(word) > 1 and word.casefold() in _KNOWN_UNITS
    return word in _SINGLE_UNITS if len(word) == 1 else word.casefold() not in _NO_UNITS


def number_beside_words(answer: str) -> Quantity | None:
    """Read a sentence with exactly one number ("It is 72", "She walked 72 miles", "72 (seventy-two)").

    None for a sentence that hedges ("3 or 4"), denies ("It is not 3") or computes ("It is 2 + x").
    """
    number = _only_number(answer)
    return number_in_sentence(*number) if number else None


def number_said(answer: str) -> Quantity | None:
    """Read such a sentence if its verb states the number ("It is 72", "It costs $18 a day"), not "Paris, 75001"."""
    sentence = _only_number(answer)
    if sentence is None:
        return None
    text, number = sentence
    before = _SIGN_OR_CURRENCY.sub("", text[: number.start()][-40:])
    return number_in_sentence(text, number) if _BEFORE_NUMBER.search(before) else None


def _only_number(answer: str) -> tuple[str, re.Match] | None:
    """Return the sentence in plain form and its number, if the rest of the sentence is words."""
    if len(answer) > MAX_NUMBER_CHARS:
        return None
    text = _UNIT_POWER.sub("", peeled(flat(answer)))
    numbers = list(NUMBER.finditer(text))
    if len(numbers) != 1:
        return None
    number = numbers[0]
    before = text[: number.start()]
    after = text[number.end() :].removesuffix("!")
    rest = f"{before} {after}"
    words = _LETTERS.findall(rest)
    is_prose = len(words) > 0 and all(_is_prose_word(word) for word in words)
    if not is_prose or _OPERATOR.search(rest):
        return None
    return text, number


def _is_prose_word(word: str) -> bool:
    if len(word) == 1 and word.isascii():
        return word in _SINGLE_UNITS or word in "AI"
    return word.casefold() not in _NO_UNITS and not _is_symbol(word)


def _is_symbol(word: str) -> bool:
    """Return whether a word has Greek letters. Next to a number they mean constants and unknowns."""
    return any("\u0370" <= character <= "\u03ff" for character in word)


def number_in_sentence(text: str, number: re.Match) -> Quantity | None:
    """Read a number inside a sentence, with the sign and the currency before it and the known unit after it.

    None for the base of a power ("2^10") and for a numeral with a base ("10_3").
    """
    if _SCRIPT.match(text, number.end()):
        return None
    before = text[: number.start()]
    unit = ""
    currency = re.search(rf"{_CURRENCY}\s?$", before[-5:])
    if currency:
        unit = _KNOWN_UNITS.get(currency[0].strip().casefold(), "")
        before = before[: len(before) - len(currency[0])]
    after = _UNIT_IN_PROSE.match(text, number.end())
    multiplier = 1
    if after:
        word = after[1].casefold()
        multiplier = _MULTIPLIERS.get(word, 1)
        is_known = word[0] in "%°$€£¥₹" or re.split(r"[\^/]", word)[0] in _KNOWN_UNITS
        known_unit = _unit(" " + after[1]) if is_known else None
        if not unit and known_unit:
            unit = known_unit[0]
    return _quantity(number, _is_negative(before), unit, multiplier)


def _is_negative(before: str) -> bool:
    """Return whether the text before a number ends with a minus sign, not with an operator or a dash."""
    spelt = _MINUS_WORD.search(before[-12:])
    if spelt:
        before = before[: len(before) - len(spelt[0])] + "- "
    if before.endswith("-"):
        if len(before) == 1:
            return True
        previous = before[-2]
        is_dash_or_operator = previous == "-" or _OPERAND.match(previous) is not None
        return not is_dash_or_operator or _BEFORE_SIGN.search(before[:-1][-12:]) is not None
    head = before.rstrip()
    if not head.endswith("-") or len(before) - len(head) > 2:
        return False
    return _BEFORE_SIGN.search(head[:-1].rstrip()[-12:]) is not None


def number_text(value: Fraction) -> str:
    """Return the shortest decimal of a number, or numerator/denominator if it has no finite decimal."""
    rest = value.denominator
    places = 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest //= prime
            count += 1
        places = max(places, count)
    if rest != 1:
        return f"{value.numerator}/{value.denominator}"
    scaled = abs(value.numerator) * 10**places // value.denominator
    digits = str(scaled).rjust(places + 1, "0")
    text = digits
    if places:
        text = f"{digits[:-places]}.{digits[-places:]}"
    return f"-{text}" if value < 0 else text


def same_quantity(left: Quantity, right: Quantity) -> bool:
    """Compare values exactly. Two known units must be equal. Compared with a bare number, 50 % equals 50 and 0.5."""
    if {left.unit, right.unit} == {"%", ""}:
        percent, bare = (left, right) if left.unit == "%" else (right, left)
        return bare.value in (percent.value, percent.value / 100)
    if left.unit and right.unit and left.unit != right.unit:
        return False
    return left.value == right.value


def grade(text: str) -> float | None:
    """Read the number at the start of a text as a grade: "8", "7.5", "7,5", "1e1", "8/10" and "4/5" (8); None without.

    A fraction is scaled to a grade of 10. A range ("8-9") is not a grade.
    """
    text = flat(text[:MAX_NUMBER_CHARS]).lstrip(" *_`\"'([{$\n\t")
    found = _GRADE.match(text)
    if found is None:
        return None
    number = Fraction(found[1].replace(",", "."))
    exponent = int(found[2] or 0)
    value = number * Fraction(10) ** exponent
    if found[3]:
        largest = Fraction(found[3])
        if largest == 0:
            return None
        value = value * 10 / largest
    return float(value) if 0 <= value < 10**12 else None


def listed_numbers(text: str) -> list[float]:
    """Read the numbers at the start of a text that lists them ("3, 8.5, -2"), up to the first word."""
    listed = flat(text[:MAX_NUMBER_CHARS]).lstrip(" *_`([{$\n\t")
    numbers: list[float] = []
    for item in _SEPARATOR.split(listed):
        if not item:
            continue
        number = quantity(item)
        if number is None:
            break
        numbers.append(float(number.value))
    return numbers
