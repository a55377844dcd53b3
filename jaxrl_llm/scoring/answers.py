r"""Find the answer in a text and read it: as a number, a choice, words or a formula.

Rewards, votes, evaluation and judges all use this module, so that they agree about the answer of a text.

    text      --marked, answer_of-->   the answer: a piece of the text
    answer    --quantity-->            a number with its unit, or None
    answer    --choice-->              the letter of a choice, or None
    answer    --words-->               words without case, articles and punctuation
    text      --vote-->                one key; texts with equal keys give the same answer
    two texts --is_answer-->           whether a text gives the answer of a label

Position of the answer; the first rule that matches wins:

1. Everything up to the last ``</think>`` is reasoning, and so is the text after an unclosed ``<think>``.
2. The last closed ``<answer>..</answer>``. A box inside it is the answer.
3. The last closed ``\boxed{..}`` or ``\fbox{..}``, by where it opens. An empty mark is an empty answer.
4. The last line that begins with ``####`` and a number.
5. No mark: the last number (``number_of``), or the last line that is not blank (words).

Marks inside code (backticks, fences) count only if no mark stands outside code.

How numbers are read: "." is the decimal point. "," groups digits by three, or by two and three as in India. A comma is
a decimal comma only after groups ("1.234,56"); "3,5" and "0,5" could be pairs, so they are no numbers. Digits of every
script, typographic minus signs, fullwidth forms and the spaces of typesetters are read as their ASCII forms. A unit may
be missing on one side; two known units must agree ("5 km" is not "5 m").

Every function takes time linear in the length of the text. Standard library only.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from jaxrl_llm.scoring.quantities import (
    MAX_NUMBER_CHARS,
    NUMBER,
    Quantity,
    number_beside_words,
    number_in_sentence,
    number_said,
    number_text,
    quantity,
    same_quantity,
)
from jaxrl_llm.scoring.typography import LATEX_SPACE, flat, peeled, unstyled

ARTICLES = ("a", "an", "the")

# ---- marks -------------------------------------------------------------------------------------------------------

_END_OF_THOUGHT = re.compile(r"</think>", re.I)
_OPEN_THOUGHT = re.compile(r"<think>", re.I)
_TAG = re.compile(r"<\s?(/?)\s?answer\s?>", re.I)
_BRACE = re.compile(r"\\{1,2}(?:boxed|fbox|framebox)\s{0,9}\{|\\\\|\\[{}]|[{}]")
_BARE_BOX = re.compile(r"\\{1,2}boxed\s{1,9}([^\s${}\\.,;]+)")  # "\boxed 5"
_FENCE = re.compile(r"[ \t]{0,9}(```+|~~~+)")
_INLINE = re.compile(r"(?<!`)(`+)(?!`)[^`\n]+(?<!`)\1(?!`)")
_HASHES = "####"


def without_thought(text: str) -> str:
    """Return the text after the last ``</think>``, up to a ``<think>`` that never closes. Quoted tags do not count."""
    after = 0
    for tag in _END_OF_THOUGHT.finditer(text):
        if not _is_quoted(text, tag.start(), tag.end()):
            after = tag.end()
    for tag in _OPEN_THOUGHT.finditer(text, after):
        if not _is_quoted(text, tag.start(), tag.end()):
            return text[after : tag.start()]
    return text[after:]


def _is_quoted(text: str, start: int, end: int) -> bool:
    """Return whether the same quotation mark or backtick stands on both sides, the first one after a space."""
    if start == 0 or end == len(text):
        return False
    mark = text[end]
    if mark not in "`'\"" or text[start - 1] != mark:
        return False
    if start == 1:
        return True
    before = text[start - 2]
    return before.isspace() or before in "(["


def marked(text: str) -> str | None:
    """Return the content of the mark that holds the answer (rules in the module's docstring); None without a mark."""
    text = without_thought(text)
    for searched in (_blank_code(text), text):
        tags = _tag_span(searched)
        if tags is not None:
            content = text[slice(*tags)].strip()
            box = _box_span(content)
            return content if box is None else content[slice(*box)].strip()
        box = _box_span(searched)
        if box is not None:
            return text[slice(*box)].strip()
    return _after_hashes(text)


def answer_of(text: str) -> str:
    """Return the marked answer; without a mark the last line that is not blank, "" if there is none."""
    marked_text = marked(text)
    if marked_text is not None:
        return marked_text
    lines = _lines(text)
    return lines[-1].strip() if lines else ""


def _blank_code(text: str) -> str:
    """Return the text with spaces in place of closed fenced blocks and inline code, each character at its place."""
    if "`" not in text and "~~~" not in text:
        return text
    lines: list[str] = []
    fence = ""
    opened = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        found = _FENCE.match(line)
        if found is None:
            continue
        after_fence = line[found.end() :]
        if not fence and "`" not in after_fence:
            fence = found[1]
            opened = len(lines) - 1
        elif fence and found[1].startswith(fence) and not after_fence.strip():
            lines[opened:] = [_blank(fenced) for fenced in lines[opened:]]
            fence = ""
    # A fence that never closes does not begin code.
    return _INLINE.sub(_blank_match, "".join(lines))


def _blank(code: str) -> str:
    """Return spaces in place of a code's characters. A line break at its end stays."""
    if code.endswith("\n"):
        return " " * (len(code) - 1) + "\n"
    return " " * len(code)


def _blank_match(code: re.Match[str]) -> str:
    return _blank(code[0])


def _tag_span(text: str) -> tuple[int, int] | None:
    """Return the positions where the content of the last closed <answer></answer> begins and ends."""
    opened = None
    span = None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            opened = tag.end()
        elif opened is not None:
            span = (opened, tag.start())
            opened = None
    return span


def _box_span(text: str) -> tuple[int, int] | None:
    """Return where the content of the last opened closed box begins and ends. Braces are matched in one pass."""
    if "box" not in text:
        return None
    opened: list[re.Match] = []
    span = None
    last = -1
    for brace in _BRACE.finditer(text):
        if brace[0].endswith("{") and brace[0] != r"\{":
            opened.append(brace)
        elif brace[0] == "}" and opened:
            box = opened.pop()
            if len(box[0]) > 1 and box.start() > last:
                last = box.start()
                span = (box.end(), brace.start())
    bare_boxes = list(_BARE_BOX.finditer(text))
    if bare_boxes and bare_boxes[-1].start() > last:
        return bare_boxes[-1].span(1)
    return span


def _after_hashes(text: str) -> str | None:
    if _HASHES not in text:
        return None
    for line in reversed(text.splitlines()):
        head, _, tail = line.partition(_HASHES)
        if not head.strip() and tail.strip() and quantity(tail) is not None:
            return tail.strip()
    return None


# ---- numbers -----------------------------------------------------------------------------------------------------

_ASCII_DIGIT = re.compile("[0-9]")
_ITEM = re.compile("^[ \t]{0,9}[-\u2013\u2212\u2022][ \t]+")


def number_of(text: str) -> Quantity | None:
    """Read the number that a text gives as its answer: the marked number, else the last number of the text."""
    marked_text = marked(text)
    if marked_text is not None:
        return quantity(marked_text) or number_beside_words(marked_text)
    lines = _lines(text)
    for i in reversed(range(len(lines))):
        has_digits, number = _number_of_line(lines, i)
        if has_digits:
            return number
    return None


def _lines(text: str) -> list[str]:
    """Return the lines after the thought that are not blank."""
    return [line for line in without_thought(text).splitlines() if line.strip()]


def _number_of_line(lines: list[str], i: int) -> tuple[bool, Quantity | None]:
    """Return whether a line has digits, and its last number; None for digits that are grouped in no known way.

    "- 7" is an item of a list if it is one line of several, unless the line before ends with "=".
    """
    line = lines[i]
    if line.isascii() and not _ASCII_DIGIT.search(line):
        return False, None
    continues = i > 0 and lines[i - 1].rstrip().endswith("=")
    if len(lines) > 1 and not continues:
        line = _ITEM.sub("", line)
    text = flat(line)
    numbers = list(NUMBER.finditer(text))
    return (True, number_in_sentence(text, numbers[-1])) if numbers else (False, None)


def integer_of(text: str) -> str | None:
    """Return the integer that a text gives as its answer, with the digits as written ("-1000", "007"), or None."""
    number = number_of(text)
    if number is None or number.value.denominator != 1:
        return None
    whole = number.digits.partition(".")[0]
    return whole if whole[-1:].isdigit() else str(number.value.numerator)


# ---- choices, words, formulas ------------------------------------------------------------------------------------

_BARE_CHOICE = re.compile(r"(?:(?:option|choice|answer)\s?:?\s)?[(\[]?([A-Za-z])[)\].:]?", re.I)
_CHOICE_WITH_TEXT = re.compile(r"(?:(?:option|choice|answer)\s?:?\s)?(?:\(([A-Z])\)|([A-Z])[).:])\s.*", re.S)

_CHOICE_SAID = re.compile(
    r"(?i:answer|option|choice|antwort|réponse|respuesta|risposta|ответ|答案)\s?(?i:is|ist|est|es|è|:|是|为)?\s?[:(\[]?\s?"
    r"([A-Z])[)\]]?\.?$"
)

# Writing systems without spaces between words: each character is a word.
_UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])"
)
_SIGNED = r"(?:(?<![\w)\]}])-(?=\.?[0-9]))?"
_THOUSANDS = r"[0-9]{1,3}(?:[,'][0-9]{3})+(?![0-9])"
_WORD = re.compile(
    rf"{_SIGNED}(?:(?:{_THOUSANDS}|[0-9]+|(?<!\w))\.[0-9]+|{_THOUSANDS}|[^\W\d_]+(?=[0-9]+\.[0-9])"
    r"|[^\s!-/:-@\[-`{-~]+)"
)
_DECIMAL = re.compile(r"-?[0-9]*(?:[,'][0-9]{3})*(?:\.[0-9]+)?")
# Punctuation that changes the meaning of words: "C++", "A-", "x^2 + 1", "1/2".
_SYMBOL = re.compile(
    r"\^|(?<=[\w+)\]}])\s?[+<>=]|(?<=\w)#|#(?=\w)|(?<=[0-9])\s?(?:/|\*\*?)\s?(?=[0-9])|(?<=[A-Za-z])-(?![\w-])"
)
_LETTERS = re.compile(r"[^\W\d_]+")
_SHORT_SCRIPT = re.compile(r"([_^])\{(\w+)\}")
_SHORT_ROOT = re.compile(r"\\sqrt\{(\w)\}")
_BASE_NAMES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
}
_BASE_NAMES |= {"twelve": 12, "sixteen": 16}
_IN_BASE = re.compile(rf"\(?(-?[0-9A-Za-z.]+)\)?_(?:\{{?([0-9]{{1,2}})\}}?|\{{?({'|'.join(_BASE_NAMES)})\}}?)")


def choice(answer: str) -> str | None:
    """Return the letter that an answer chooses, upper case: "B", "(b)", "B) Paris", "The answer is B."; else None."""
    text = peeled(flat(answer[:MAX_NUMBER_CHARS]))
    match = _BARE_CHOICE.fullmatch(text) or _CHOICE_WITH_TEXT.fullmatch(text) or _CHOICE_SAID.search(text[-40:])
    if match is None:
        return None
    letters = [letter for letter in match.groups() if letter]
    return letters[0].upper()


def words(text: str) -> list[str]:
    """Return words in one case, without punctuation and English articles. Numbers keep their signs and decimals.

    If a text has only articles, the result is the articles. If it has only punctuation, the result is the punctuation.
    """
    with_articles = all_words(text)
    without_articles = [word for word in with_articles if word not in ARTICLES]
    return without_articles or with_articles or text.split()


def all_words(text: str) -> list[str]:
    """Return ``words`` with the articles."""
    tokens = _WORD.findall(_spelt(text))
    return [_short(word) if _DECIMAL.fullmatch(word) else word for word in tokens]


def _spelt(text: str) -> str:
    """Return a text in one case, with ASCII punctuation alone and spaces between words."""
    text = _caseless(unstyled(text))
    if text.isascii():
        return text
    spaces = {}
    for character in set(text):
        if not character.isascii() and _is_punctuation(character):
            spaces[ord(character)] = " "
    return _UNSPACED.sub(r" \1 ", text.translate(spaces))


def _is_punctuation(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] == "P" or category in ("Sc", "Sk", "Zs", "Zl", "Zp")


def _caseless(text: str) -> str:
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", text.casefold()).replace("i\u0307", "i")


def _short(number: str) -> str:
    """Return a decimal number without group separators and without zeros at its end."""
    number = re.sub(r"^(-?)\.", r"\g<1>0.", number.replace(",", "").replace("'", ""))
    return number.rstrip("0").rstrip(".") if "." in number else number


def symbols(text: str) -> str:
    """Return the punctuation that changes the meaning of words, such as that of "C++", "A-" and "x^2 + 1"."""
    return "".join(symbol.strip() for symbol in _SYMBOL.findall(unstyled(text)))


def same_text(answer: str, right: str) -> bool:
    """Compare two answers by their words and by the symbols that change the meaning of words.

    The same number in two notations is the same text ("1/2" and "0.5"), and so is the same choice ("B" and "(b)").
    """
    if words(answer) == words(right) and symbols(answer) == symbols(right):
        return True
    number = quantity(answer)
    right_number = quantity(right)
    if number is not None and right_number is not None and number.unit == right_number.unit:
        has_same_letters = _LETTERS.findall(flat(answer)) == _LETTERS.findall(flat(right))
        return number.value == right_number.value and has_same_letters
    letter = _BARE_CHOICE.fullmatch(peeled(right))
    return letter is not None and choice(answer) == letter[1].upper()


def formula(answer: str) -> str:
    """Return an answer without styles, delimiters, spaces and a final full stop."""
    text = peeled(_without_spaces(answer))
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    text = _SHORT_SCRIPT.sub(r"\1\2", text)
    return _SHORT_ROOT.sub(r"\\sqrt\1", text)


def _without_spaces(answer: str) -> str:
    """Return an answer without styles and without spaces, those of LaTeX included."""
    parts = LATEX_SPACE.sub(" ", unstyled(answer)).split()
    return "".join(parts)


def in_base(answer: str) -> tuple[str, int] | None:
    """Read a numeral with its base, as in "10_{3}" and "1F_16"; None if no base is written."""
    text = peeled(flat(answer[:MAX_NUMBER_CHARS])).replace(" ", "")
    match = _IN_BASE.fullmatch(_SHORT_SCRIPT.sub(r"\1\2", text))
    if match is None:
        return None
    numeral = match[1].upper()
    name = match[2] or match[3]
    base = _BASE_NAMES.get(name) or int(name)
    if not 2 <= base <= 36:
        return None
    digits = re.sub("[-.]", "", numeral)
    if not re.search("[0-9]", digits):  # the text x_1 is the name of an unknown, not a numeral
        return None
    are_in_base = all(int(digit, 36) < base for digit in digits)
    return (numeral, base) if are_in_base else None


OPENING = "([{"
CLOSING = ")]}"


def brackets(answer: str) -> str:
    """Return the brackets around a pair, interval, list or set ("()", "[)", "{}"); "" if there are none."""
    text = _without_spaces(answer).strip("$").removesuffix(".").strip("$")
    text = text.replace(r"\{", "{").replace(r"\}", "}")
    if len(text) < 2 or "," not in text:
        return ""
    first = text[0]
    last = text[-1]
    if first not in OPENING or last not in CLOSING:
        return ""
    depth = 0
    for character in text[:-1]:
        if character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
        if depth == 0:
            return ""
    return first + last


# ---- verdicts ----------------------------------------------------------------------------------------------------


def key(answer: str) -> str:
    """Return a key that is the same for equal answers: a number, a letter, words or a formula."""
    number = quantity(answer) or number_said(answer)
    if number is not None:
        return number_text(number.value)
    text = peeled(flat(answer[:MAX_NUMBER_CHARS]))
    letter = _BARE_CHOICE.fullmatch(text) or _CHOICE_SAID.search(text[-40:])
    if letter:
        return letter[1].upper()
    without_commands = re.sub(r"\\[A-Za-z]+", " ", unstyled(answer))
    if re.search(r"[^\W\d_]{2}|[^\x00-\x7f]", without_commands):
        return " ".join([*words(answer), symbols(answer)]).strip()
    return formula(answer)


def vote(text: str) -> str:
    """Return the key of the answer of a text; "" without an answer.

    Without a mark the answer is the last number of the last line, else the words of the last line.
    """
    marked_text = marked(text)
    if marked_text is not None:
        return key(marked_text) if marked_text else ""
    lines = _lines(text)
    if not lines:
        return ""
    number = _number_of_line(lines, len(lines) - 1)[1]
    return number_text(number.value) if number is not None else key(lines[-1].strip())


def accepted(label: Any) -> list[str]:
    """Return the accepted texts of a label, which is a value or a list of values; of "so 72\\n#### 72" it is "72".

    Null and empty values are left out.

    Raises:
        ValueError: no text is left, so that there is nothing to compare with.
    """
    values = label if isinstance(label, list | tuple) else [label]
    texts = []
    for value in values:
        if value is None:
            continue
        _, _, after_hashes = str(value).rpartition(_HASHES)
        text = after_hashes.strip()
        if text:
            texts.append(text)
    if not texts:
        raise ValueError(f"answer={label!r:.80} is empty: there is nothing to compare with. Give a text or a number")
    return texts


def is_answer(text: str, label: Any) -> bool:
    """Return whether a text gives the answer of a label: the same number, choice, formula or words.

    A label is read as a number only if it contains nothing else ("#### 72", "5 km"). If the label has a box, only the
    box counts.
    """
    return any(_meets(text, answer_of(one)) for one in accepted(label))


def _meets(text: str, right: str) -> bool:
    wanted = quantity(right)
    if wanted is not None:
        number = number_of(text)
        return number is not None and same_quantity(number, wanted)
    answer = answer_of(text)
    letter = _BARE_CHOICE.fullmatch(peeled(right))
    if letter and choice(answer) == letter[1].upper():
        return True
    return bool(answer) and key(answer) == key(right)
