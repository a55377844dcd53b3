# ruff: noqa: RUF001 (the rows are about characters that look alike)
r"""The answer of a text, and whether it is the answer of a label: a table decided by hand.

Readers: "answer" is ``is_answer`` (short_steps, fapo, own), "text" is ``same_text`` (exact, key_steps), "integer" is
``integer_of`` (reasoning-gym, the main job), "vote" compares the votes of two texts (majority, maj@K).
"""

import time
from fractions import Fraction

import pytest
from support.tiers import mostly_in

from jaxrl_llm.scoring import answers
from jaxrl_llm.scoring.quantities import grade, listed_numbers, number_text, quantity
from jaxrl_llm.scoring.typography import plain, unstyled

READERS = {
    "answer": answers.is_answer,
    "text": lambda text, label: answers.same_text(answers.answer_of(text), label),
    "integer": lambda text, label: answers.integer_of(text) == label,
    "vote": lambda text, other: answers.vote(text) == answers.vote(other),
}

# Where the answer stands: reader, text, label, whether the text gives the answer of the label.
MARKS = [
    ("answer", "<answer>7</answer> (in 2 steps)", "7", True),
    ("answer", "<answer>7</answer> (in 2 steps)", "2", False),
    ("answer", "<answer>4</answer> no, <answer>5</answer>", "5", True),
    ("answer", "<answer>4</answer> no, <answer>5</answer>", "4", False),
    ("answer", r"\boxed{4}, no: \boxed{5}", "5", True),
    ("answer", r"\boxed{4}, no: \boxed{5}", "4", False),
    ("answer", r"<answer>4</answer> \boxed{5}", "4", True),  # the tag decides over the box
    ("answer", r"<answer>so it is \boxed{5}</answer>", "5", True),
    ("answer", r"\boxed{<answer>5</answer>}", "5", True),
    ("answer", r"\boxed{\boxed{5}}", "5", True),
    ("answer", r"\boxed{\text{\fbox{5}}}", "5", True),
    ("answer", r"\fbox{5}", "5", True),
    ("answer", r"\\boxed{5}", "5", True),  # a backslash doubled by JSON
    ("answer", r"\boxed 5", "5", True),
    ("answer", r"\boxed {5}", "5", True),
    ("answer", "<Answer> 5 </ANSWER>", "5", True),
    ("answer", "< answer >5</ answer >", "5", True),
    ("answer", "<answer></answer> 5", "5", False),  # an empty mark is an empty answer
    ("answer", r"5 \boxed{}", "5", False),
    ("answer", r"\boxed{ } so 5", "5", False),
    ("answer", "<answer>5", "5", True),  # a mark that never closes is no mark
    ("answer", r"<answer>4</answer> then <answer>5", "4", True),
    ("answer", "5</answer>", "5", True),
    ("answer", r"\boxed{\{5\}", r"\boxed{\{5\}", True),
    ("answer", r"x = \{1, \boxed{2}", "2", True),  # an escaped brace opens nothing
    ("answer", r"} \boxed{5} {", "5", True),
    ("answer", r"{ { \boxed{5}", "5", True),
    ("answer", "<think>\\boxed{5}</think> It is \\boxed{6}", "6", True),
    ("answer", "<think>\\boxed{5}</think> It is \\boxed{6}", "5", False),
    ("answer", "<think>It is \\boxed{5}</think>", "5", False),  # a thought is no answer
    ("answer", "<think>It is \\boxed{5}", "5", False),
    ("answer", "It is \\boxed{5}</think>6", "5", False),  # the template has opened the thought
    ("answer", "It is \\boxed{5}</think>6", "6", True),
    ("answer", "<answer>5</answer></think>", "5", False),
    ("answer", 'a</think> The tag "</think>" ends it. \\boxed{5}', "5", True),
    ("answer", 'I say "no"</think>"no"', "no", True),  # ends a thought between two quotations
    ("answer", 'It is "5"</think>"6"', "5", False),
    ("answer", "\\boxed{5}, and `</think>` ended my thought", "5", True),
    ("answer", "<answer>7</answer>\nThe form was `<answer>8</answer>`.", "7", True),
    ("answer", "\\boxed{7}\n```\n\\boxed{8}\n```\n", "7", True),
    ("answer", "\\boxed{7}\n~~~latex\n\\boxed{8}\n~~~", "7", True),
    ("answer", "```\n\\boxed{8}\n```", "8", True),  # the only mark
    ("answer", "`\\boxed{8}`", "8", True),
    ("answer", "\\boxed{7}\n```\nnever closed \\boxed{8}", "8", True),
    ("answer", "#### 72\nQuestion: what is 3 + 4?", "72", True),
    ("answer", "#### 72\nQuestion: what is 3 + 4?", "4", False),
    ("answer", "#### Step 1: add\nIt is 9.", "9", True),  # a heading is no answer
    ("answer", "It is 5 apples.\n\nThat is all.", "5", True),
    ("answer", "It is 5, not 3.", "5", False),  # without a mark the last number counts
    ("answer", "", "5", False),
    ("answer", "no idea", "5", False),
    ("text", "So\n<answer>Rome</answer> is it", "Rome", True),
    ("text", "I think so.\nRome", "Rome", True),
    ("text", "<think>Rome</think>", "Rome", False),
    ("text", "Rome\nI am done.", "Rome", False),
]

# Numbers: text, label, verdict of "answer".
NUMBERS = [
    (r"\boxed{5.}", "5", True),
    (r"\boxed{12\,000}", "12000", True),
    (r"\boxed{12{,}000}", "12000", True),
    (r"\boxed{12,\!000}", "12000", True),
    ("\\boxed{12\u2009000}", "12000", True),
    ("\\boxed{12\u202f000}", "12000", True),
    ("12\u00a0000", "12000", True),
    (r"\boxed{12 000}", "12000", True),
    ("in 2024 100 people came", "100", True),  # prose has no groups by spaces
    ("12'000", "12000", True),
    ("12’000", "12000", True),
    ("12,34,567", "1234567", True),  # India
    ("1.234.567", "1234567", True),
    ("1.234,56", "1234.56", True),
    ("1 234", "1234", False),
    ("1,23", "123", False),
    ("1,5", "15", False),
    ("1,5", "1.5", False),  # a pair or a decimal: not decided
    ("0,5", "0.5", False),
    ("12,34", "1234", False),
    ("1,2345", "12345", False),
    ("1.000", "1", True),
    ("1.000", "1000", False),
    ("½", "0.5", True),
    (r"\boxed{½}", r"\frac12", True),
    ("5½", "5.5", True),
    ("5½", "5", False),
    ("1 1/2", "1.5", True),
    (r"\boxed{1\frac{1}{2}}", "3/2", True),
    (r"\dfrac{3}{4}", "0.75", True),
    (r"\boxed{-\frac{3}{4}}", r"\frac{-3}{4}", True),
    (r"\boxed{\frac{3}{-4}}", "-0.75", True),
    (r"\boxed{\frac{3}{4}}", "4/3", False),
    (r"\boxed{\frac{3}{4}}", "4", False),
    ("1/0", "0", False),
    ("3/4/2024", "0.75", False),
    ("5", "5", True),
    (r"\boxed{５}", "5", True),
    ("１２．５％", "12.5", True),
    ("٣٫٥", "3.5", True),  # Arabic-Indic digits
    ("١٬٢٣٤", "1234", True),
    ("१२३", "123", True),  # Devanagari
    ("১২", "12", True),  # Bengali
    ("答案是７。", "7", True),
    ("答案是−7", "-7", True),
    ("答案是- 7", "-7", True),
    (r"\boxed{\color{red}5}", "5", True),
    (r"\boxed{{\color{red}5}}", "5", True),
    (r"\boxed{\textcolor{blue}{5}}", "5", True),
    (r"\boxed{\textbf{5}}", "5", True),
    (r"\boxed{\mathbf{\text{5}}}", "5", True),
    ("<answer>**5**</answer>", "5", True),
    ("<answer>`5`</answer>", "5", True),
    ("<answer>$5$</answer>", "5", True),
    (r"<answer>\(5\)</answer>", "5", True),
    ("<answer>(5)</answer>", "5", True),
    ("<answer>“5”</answer>", "5", True),
    (r"\boxed{x = 5}", "5", True),
    (r"\boxed{2 + 3 = 5}", "5", True),
    (r"\boxed{x \approx 5}", "5", True),
    (r"\boxed{x > 5}", "5", False),
    (r"\boxed{x \neq 5}", "5", False),
    (r"\boxed{x >= 5}", "5", False),
    (r"\boxed{x = 3, y = 5}", "5", False),
    (r"\boxed{\pm 5}", "5", False),
    (r"\boxed{5!}", "5", False),
    (r"\boxed{5\pi}", "5", False),
    (r"\boxed{5π}", "5", False),
    (r"\boxed{5\sqrt{2}}", "5", False),
    (r"\boxed{5x}", "5", False),
    (r"\boxed{5 x}", "5", False),
    (r"\boxed{5i}", "5", False),
    (r"\boxed{5^2}", "5", False),
    (r"\boxed{10_{3}}", "10", False),
    (r"\boxed{10_{3}}", "10_2", False),
    (r"\boxed{10_{3}}", "10_3", True),
    ("10₃", r"\boxed{10_{3}}", True),
    (r"\boxed{25_{10}}", "25", True),
    (r"\boxed{5\\}", "5", True),
    (r"\boxed{5^{\text{th}}}", "5", True),
    (r"\boxed{2^{10}}", "2", False),
    ("It is 2^10", "10", False),
    ("It is 2^10", "2", False),
    ("It is x₁", "1", False),
    ("minus 5", "-5", True),
    (r"\boxed{\text{minus 5}}", "-5", True),
    ("The answer is negative 5.", "-5", True),
    ("7 minus 5", "5", True),
    (r"\boxed{\sqrt2}", r"\sqrt{2}", True),
    (r"\boxed{0.\overline{3}}", "0.3", False),
    (r"\boxed{5 \pm 1}", "5", False),
    ("Ответ: −7", "-7", True),
    ("La réponse est : −7", "-7", True),
    ("คำตอบคือ ๗", "7", True),
    ("€5.000,50", "5000.50", True),
    ("₹1,00,000", "100000", True),
    (r"\boxed{0.333...}", "0.333", False),
    (r"\boxed{(3, 4)}", "4", False),
    (r"\boxed{3, 4}", "4", False),
    (r"\boxed{3 or 4}", "4", False),
    (r"\boxed{not 4}", "4", False),
    ("<answer>It is 72</answer>", "72", True),
    ("<answer>It costs $18 a day</answer>", "18", True),
    ("<answer>between 3 and 4</answer>", "4", False),
    ("<answer>It is not 4</answer>", "4", False),
    ("<answer>Paris, 75001</answer>", "75001", True),  # the only number, if a number is asked for
    ("<answer>She walked 72 miles</answer>", "72", True),
    ("<answer>72 (seventy-two)</answer>", "72", True),
    ("<answer>f(72)</answer>", "72", False),
    ("<answer>sin 72</answer>", "72", False),
    ("<answer>It is 72!</answer>", "72", True),
    (r"<answer>$5!\text{ ways}$</answer>", "5", False),
    ("- 7", "-7", True),
    ("-7", "7", False),
    ("The answer is - 7", "-7", True),
    ("The answer is – 7.", "-7", True),
    ("The answer is –7.", "-7", True),
    ("The answer is −7.", "-7", True),
    ("The answer is ‑7.", "-7", True),  # a hyphen that does not break
    ("The answer is —7.", "-7", False),  # an em dash separates
    ("The answer—7", "7", True),
    ("x = - 7", "-7", True),
    (r"\boxed{- 7}", "-7", True),
    (r"\boxed{-\$7}", "-7", True),
    ("5 - 2", "2", True),
    ("5-2", "2", True),
    ("5 -2", "-2", True),
    ("pages 3–5", "5", True),
    ("COVID-19", "19", True),
    ("COVID-19", "-19", False),
    ("Answer - 7", "7", True),  # a dash
    ("Found:\n- 5 apples\n- 7 pears", "7", True),  # items of a list
    ("x =\n- 7", "-7", True),
    ("6.02×10²³", "6.02e23", True),
    (r"\boxed{6.02 \times 10^{23}}", "602000000000000000000000", True),
    (r"\boxed{10^{-5}}", "1e-5", True),
    ("2·10³", "2000", True),
    ("1e-5", "0.00001", True),
    ("1e-5", "1", False),
    ("2e-1x", "0.2", False),
    ("9" * 5000, "9", False),
    ("5 million", "5000000", True),
    ("$5 million", "5", False),
    ("2 dozen eggs", "24", True),
    ("5万", "50000", True),
    ("007", "7", True),
    ("+5", "5", True),
    (".5", "0.5", True),
    ("8...5", "5", True),
]

# Units: text, label, verdict of "answer".
UNITS = [
    (r"\boxed{5\text{ km}}", "5", True),
    (r"\boxed{5\,\mathrm{cm}}", "5", True),
    (r"\boxed{5~\mathrm{cm}}", "5 cm", True),
    (r"\boxed{90^\circ}", "90", True),
    (r"\boxed{90^{\circ}}", "90°", True),
    (r"\boxed{5 m^2}", "5", True),
    (r"\boxed{5 m²}", "5 m^2", True),
    (r"\boxed{5km}", "5", True),
    ("It is 5,000 km².", "5000", True),
    (r"\boxed{-5^\circ\text{C}}", "-5 °C", True),
    ("5 km", "5 kilometers", True),
    (r"\boxed{5 km}", "5 m", False),
    (r"\boxed{5 cm}", "5 cm^2", False),
    ("It is 5 km.", "5 km/h", False),
    ("It is 5 km/h.", "5 km/h", True),
    (r"\boxed{5 \text{ dollars}}", "$5", True),
    (r"\boxed{5 €}", "$5", False),
    (r"\boxed{\$5}", "5 apples", True),
    ("5 apples", "5", True),
    ("5个", "5", True),
    ("5 яблок", "5", True),
    (r"\boxed{50\%}", "50", True),
    (r"\boxed{50\%}", "0.5", True),
    ("0.5", "50%", True),
    ("0.5%", "50%", False),
    ("50%", "5000", False),
    ("30 °C", "30 °F", False),
    ("30°", "30 °C", True),
    (r"\boxed{72 m + 1}", "72", False),
    (r"\boxed{5 or x}", "5", False),
    (r"\boxed{3 feet 2 inches}", "3", False),
]

# Words: text, label, verdict of "text".
WORDS = [
    ("“Paris”", "Paris", True),
    ("«Paris»", "Paris", True),
    ("It’s Paris", "It's Paris", True),
    ("It´s Paris", "It's Paris", True),
    ("Paris…", "Paris", True),
    ("¡Madrid!", "Madrid", True),
    ("¿Madrid?", "madrid", True),
    ("北京。", "北京", True),
    ("「北京」", "北京", True),
    ("北京", "东京", False),
    ("ﾄｳｷｮｳ", "トウキョウ", True),  # halfwidth
    ("Ｐａｒｉｓ", "Paris", True),
    ("Paris–France", "Paris-France", True),
    ("Paris – France", "Paris-France", True),
    ("Cafe\u0301", "Café", True),  # NFD and NFC
    ("Cafe", "Café", False),
    ("STRASSE", "Straße", True),
    ("ΟΔΟΣ", "οδός", False),
    ("Σίσυφος", "ΣΊΣΥΦΟΣ", True),
    ("İstanbul", "istanbul", True),
    ("हिन्दी", "हिन्दी।", True),
    ("हिन्दी", "हन्द", False),  # vowel signs are letters
    ("القاهرة.", "القاهرة", True),
    ("القاهرة؟", "الرياض", False),
    ("Мо\u00adсква", "Москва", True),  # a soft hyphen
    ("Paris\u200b", "Paris", True),
    ("the Eiffel tower", "Eiffel Tower", True),
    ("Eiffel tower in Paris", "Eiffel Tower", False),
    (r"\boxed{\text{Paris}}", "Paris", True),
    (r"\boxed{\textbf{Paris}.}", "Paris", True),
    ("**Paris**", "Paris", True),
    ("C++", "C", False),
    ("C#", "C", False),
    ("C++.", "c++", True),
    ("A-", "A", False),
    ("A+", "A-", False),
    ("x^2+1", "x^2-1", False),
    ("x^2 + 1", "x^2+1", True),
    ("1/2", "1 2", False),
    ("1/2", "½", True),
    (r"\boxed{\frac12}", "0.5", True),
    ("12\u202f000", "12,000", True),
    ("５", "5", True),
    ("-5", "5", False),
    ("3.5", "35", False),
    ("3 5", "3.5", False),
    ("5 apples", "5 pears", False),
    ("50 %", "50%", True),
    ("(B)", "B", True),
    ("b", "B", True),
    ("B) Paris", "B", True),
    ("B. Paris", "B", True),
    (r"\boxed{\text{(B)}}", "B", True),
    ("Option B", "B", True),
    ("The answer is (B).", "B", True),
    ("The correct answer is A", "A", True),
    ("Answer: C", "C", True),
    ("答案是B。", "B", True),
    ("Die Antwort ist D.", "D", True),
    ("The answer is a cat", "A", False),
    ("The answer is B", "A", False),
    ("The answer is A or B", "B", False),
    ("Ｂ", "B", True),
    ("> Paris", "Paris", True),  # marks of Markdown
    ("+ Paris", "Paris", True),
    ("# Paris", "Paris", True),
    ("= Paris", "Paris", True),
    ("x > 5", "x < 5", False),
    ("x = 5", "x 5", False),
    ("1 + 1", "1 1", False),
    ("A cat", "A", False),
    ("10**5", "10 5", False),
    ("B or C", "B", False),
    ("AB", "A", False),
    ("J. Smith", "J. Brown", False),
    ("J", "J. Brown", False),
    ("", "B", False),
]

# Votes: two texts, whether they vote for the same.
VOTES = [
    ("so 4", r"\boxed{4.0}", True),
    ("It is 1,000.", r"\boxed{1\,000}", True),
    (r"\boxed{\frac{1}{2}}", "0.5", True),
    (r"\boxed{\frac{3}{2}}", r"\boxed{\frac{1}{2}}", False),
    ("So:\nYes.", "yes", True),
    ("yes", "no", False),
    ("<answer>(B)</answer>", "<answer>b</answer>", True),
    ("<answer>Paris</answer>", "<answer>“Paris”.</answer>", True),
    (r"\boxed{x^2 + 1}", r"\boxed{x^2+1}", True),
    (r"\boxed{x^2+1}", r"\boxed{x^2-1}", False),
    (r"\boxed{(3, 4)}", r"\boxed{(3,4)}", True),
    (r"\boxed{(3, 4)}", r"\boxed{4}", False),
    (r"\boxed{\dfrac{\pi}{2}}", r"\boxed{\frac{\pi}{2}}", True),
    (r"\boxed{10_{3}}", r"\boxed{10_2}", False),
    (r"\boxed{10_{3}}", r"\boxed{10_3}", True),
    ("<answer>Paris, 75001</answer>", "<answer>Rome, 75001</answer>", False),
    ("<answer>C++</answer>", "<answer>C</answer>", False),
    ("<think>5</think>", "", True),
    ("The answer is (A).", "A", True),
    ("The answer is (A).", "The answer is (B).", False),
    ("北京。", "北京", True),
]

# Integers of reasoning-gym: text, digits.
INTEGERS = [
    ("4 - 1 = 3", "3"),
    ("= -3", "-3"),
    ("-3.", "-3"),
    ("5-2", "2"),
    ("5 -2", "-2"),
    ("5 - 2", "2"),
    ("(-12)", "-12"),
    ("x=-7 is the answer", "-7"),
    ("007", "007"),
    ("7.2248", None),
    ("3, then .5", None),
    ("1,2248", None),
    ("It is 1,234.", "1234"),
    ("-1,000.00", "-1000"),
    ("\u22123", "-3"),
    ("8...5", "5"),
    ("no number - none", None),
    ("", None),
    ("<answer>7</answer> (in 2 steps)", "7"),
    (r"\boxed{7} after 3 steps", "7"),
    ("7 after <answer></answer> 3 steps", None),
    ("<answer>3 or 4</answer>", None),
    ("<answer>2 + 5 = 7</answer>", "7"),
    ("7\nDone.", "7"),
    ("-3 or 4", "4"),
    ("it is 3/4", None),
    ("it is 8/4", "2"),
    ("2 × 10³", "2000"),
    ("50%", "50"),
    ("<answer>7</answer>\n<answer>", "7"),
    ("The answer is-5", "-5"),
    ("(2+7)-5", "5"),
    ("so .1,000", None),
    (".0", "0"),
    ("-.0", "0"),
    ("2**3", "3"),
    ("5,000 km²", "5000"),
    ("It is x²", None),
    ("2^10 = 1,024", "1024"),
    ("x_1 = 7", "7"),
    ("1,000**12", "12"),
    ("The sum is **5**.", "5"),
    ("The sum is **-5**", "-5"),
    ("The sum is -**5**", "-5"),
    ("**Answer:**5", "5"),
    ("1,000,", "1000"),
    ("3 - 5 = - 2", "-2"),
    ("3 - 5 = -2, so 2 less", "2"),
    ("$5$", "5"),
    ("$-5$", "-5"),
    (r"\(-5\)", "-5"),
    (r"It is $\boxed{-5}$ and not 5", "-5"),
    ("5\n\n\n", "5"),
    ("Answer: 5 (five)", "5"),
]

ROWS = [
    *MARKS,
    *(("answer", *row) for row in NUMBERS),
    *(("answer", *row) for row in UNITS),
    *(("text", *row) for row in WORDS),
    *(("vote", *row) for row in VOTES),
    *(("integer", *row, True) for row in INTEGERS),
]


@pytest.mark.parametrize(("reader", "text", "label", "verdict"), ROWS)
def test_verdicts(reader, text, label, verdict):
    assert READERS[reader](text, label) == verdict


def test_the_table_is_large_and_half_of_it_refuses_or_is_adversarial():
    assert len(ROWS) > 300
    assert sum(not verdict for *_, verdict in ROWS) > 90
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize(
    ("text", "answer", "vote"),
    [
        ("I think.\n<answer>Paris</answer> <answer> Rome </answer>", "Rome", "rome"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}", "0.5"),
        ("first\nThe answer is 1,000.50.\n\n", "The answer is 1,000.50.", "1000.5"),
        ("-3", "-3", "-3"),
        ("it is 2/3", "it is 2/3", "2/3"),
        (r"\boxed{7", r"\boxed{7", "7"),
        ("", "", ""),
        ("100", "100", "100"),
        ("It has 3 of 4", "It has 3 of 4", "4"),
        (r"\boxed{\$1,250.0}", r"\$1,250.0", "1250"),
        ("<answer>$12.50</answer>", "$12.50", "12.5"),
        ("<think>In <answer> it is.</think><answer>5</answer>", "5", "5"),
        ("It is -.50", "It is -.50", "-0.5"),
        ("It is \u22123", "It is \u22123", "-3"),
        ("It is 1e-5.", "It is 1e-5.", "0.00001"),
        (r"\boxed{6.020E3}", "6.020E3", "6020"),
        ("1 or 2?\nI am not sure.", "I am not sure.", "i am not sure"),
        (r"\boxed{(3, 4)}", "(3, 4)", "(3,4)"),
    ],
)
def test_what_the_answer_of_a_completion_is(text, answer, vote):
    assert (answers.answer_of(text), answers.vote(text)) == (answer, vote)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The area (A) is -3.50, not 3!", ["area", "is", "-3.5", "not", "3"]),
        ("1,000.0 = 10^3, and 1,2 or 12,34", ["1000", "10", "3", "and", "1", "2", "or", "12", "34"]),
        ("5-3 x=-3 (p+q)-3 {-3}", ["5", "3", "x", "-3", "p", "q", "3", "-3"]),
        (r"5\times2.5=.5 and \frac{1}{2}-0.50", ["5", "times", "2.5", "0.5", "and", "frac", "1", "2", "0.5"]),
        ("\u22127 is -7, -2x a 2nd B12.", ["-7", "is", "-7", "-2x", "2nd", "b12"]),
        ("3.14.15 3.5km key_step", ["3.14", "15", "3.5", "km", "key", "step"]),
        ("100 007 10.00", ["100", "007", "10"]),
        ("A", ["a"]),
        ("The an", ["the", "an"]),
        (" ++ ", ["++"]),
        (" ", []),
        ("我在北京", ["我", "在", "北", "京"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("L’été “dernier”", ["l", "été", "dernier"]),
    ],
)
def test_words_are_without_articles_and_punctuation_and_numbers_are_whole(text, words):
    assert answers.words(text) == words


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("48 + 24 = 72\n#### 72", ["It is 72.", r"\boxed{72}", "<answer>72 clips</answer>"], ["#### 7"]),
        (r"so \boxed{\$1,250.0}", ["$1250", r"\boxed{\$1,250}"], ["250"]),
        ("5 km/h", ["5 km/h", "5"], [r"\boxed{5x}"]),
        ("50%", [r"\boxed{50\%}", "50"], ["0"]),
        ("30 °C", ["It is 30°C", "30", r"\boxed{30°}"], ["It is 3°C"]),
        ("5 €", ["It costs 5 €.", r"\boxed{€5}"], ["50 €"]),
        ("+5", ["5", r"\boxed{+5}"], ["-5"]),
        (r"\frac{1}{2}", [r"\boxed{\frac{1}{2}}", r"$\frac{1}{2}$"], [r"\boxed{2}", "The answer is 2."]),
        (r"2\sqrt{3}", [r"\boxed{2\sqrt{3}}"], ["3"]),
        ("(3, 4)", [r"\boxed{(3, 4)}"], ["4"]),
        ("Paris, 75001", ["Paris, 75001"], ["75001", "Paris"]),
        (".5", ["0.5", "It is .5"], ["5"]),
        ("3", ["3"], ["It is \u22123"]),
        ("-3", ["It is \u22123"], ["3"]),
    ],
)
def test_a_label_is_a_number_only_if_it_is_nothing_else(label, right, wrong):
    verdicts = [answers.is_answer(text, label) for text in right + wrong]
    assert verdicts == [True] * len(right) + [False] * len(wrong)


def test_a_quantity_is_exact_and_keeps_its_digits():
    assert quantity("-1,000.50 km") == (Fraction(-2001, 2), "km", "-1000.50")
    assert quantity("2.5e3") == (Fraction(2500), "", "")
    assert quantity("72 km or so") is None and quantity("") is None and quantity("9" * 3000) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [("7", "7"), ("-1/2", "-0.5"), ("1/3", "1/3"), ("1000", "1000"), ("1/1000", "0.001"), ("-7/6", "-7/6")],
)
def test_a_number_is_written_as_a_decimal_if_it_is_one(value, text):
    assert number_text(Fraction(value)) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(
            ("8", 8),
            (" **7.5**", 7.5),
            ("7,5", 7.5),
            ("1e1", 10),
            ("8/10", 8),
            ("4/5", 8),
            ("80/100", 8),
            ("8 out of 10", 8),
        ),
        *(("08", 8), ("8.", 8), ("8 - good", 8), ("\uff18", 8), ("$8$", 8), (r"\boxed{8}", 8), ("(8)", 8)),
        *(("8-9", None), ("-3", None), ("1/0", None), ("8x", None), ("eight", None), ("", None), ("1e99", None)),
        *(("8\u20139", None), ("1,000", 1)),
    ],
)
def test_grades(text, value):
    assert grade(text) == value


def test_lists_of_scores():
    assert listed_numbers(" 3, 8.5, 2") == [3, 8.5, 2] and listed_numbers(" [9, \u22122]") == [9, -2]
    assert listed_numbers("8; 1e1") == [8, 10] and listed_numbers("a, 3") == []


def test_plain_characters():
    assert plain("\u2212\uff15\u00a0\u00bd\u00b2") == "-5  1/2^{2}"
    assert plain("e\u0301") == "\u00e9" and plain("a\u200bb") == "ab"
    assert unstyled(r"\textbf{a {b} \{c\}} \left(\color{red}d\right)") == r"a {b} \{c\} (d)"


LONG = 30_000
FLOODS = [
    *(
        "<answer>" * (LONG // 8),
        "<answer>1" * (LONG // 9),
        "</answer>" * (LONG // 9),
        "<answer></answer>" * (LONG // 17),
    ),
    *(r"\boxed{" * (LONG // 7), r"\boxed{1}" * (LONG // 9), "{" * LONG, "}" * LONG, "{}" * (LONG // 2), "\\" * LONG),
    *("`" * LONG, "` " * (LONG // 2), "`a`" * (LONG // 3), "```\n" * (LONG // 4), "~~~\n" * (LONG // 4)),
    *("<think>" * (LONG // 7), "</think>" * (LONG // 8), "#### 7\n" * (LONG // 7), "#### x\n" * (LONG // 7)),
    *(
        "1" * LONG,
        "1," * (LONG // 2),
        "1 " * (LONG // 2),
        "1/" * (LONG // 2),
        "1e" * (LONG // 2),
        "1,000," * (LONG // 6),
    ),
    *("1'000" * (LONG // 5), "10^" * (LONG // 3), "1 * 10" * (LONG // 6), "1.1" * (LONG // 3), ".1" * (LONG // 2)),
    *("- " * (LONG // 2), "-" * LONG, " " * LONG, "\n" * LONG, " \n" * (LONG // 2), "a" * LONG, "a " * (LONG // 2)),
    *(
        "\u00a0" * LONG,
        "1\u2009" * (LONG // 2),
        "\u00bd" * LONG,
        "\u00b2" * LONG,
        "\u5317" * LONG,
        "e\u0301" * (LONG // 2),
    ),
    *(r"\textbf{" * (LONG // 8), r"\color{" * (LONG // 7), r"\color[" * (LONG // 7), r"\frac{1" * (LONG // 7)),
    *(
        r"\frac{1}" * (LONG // 8),
        r"\textcolor{a}" * (LONG // 13),
        r"\text{\frac{1}{" * (LONG // 15),
        "$" * LONG,
        "(" * LONG,
    ),
    *("score: " * (LONG // 7), "is - 7 " * (LONG // 7), "A) " * (LONG // 3), "=" * LONG, "x_{1}" * (LONG // 5)),
]


@pytest.mark.parametrize("flood", mostly_in("slow", FLOODS, plain=12), ids=lambda flood: ascii(flood[:12]))
@pytest.mark.parametrize("around", ["{}", r"7 \boxed{{{}}}", "x\n{}x"])
def test_time_grows_with_the_length_alone(flood, around):
    """The seven calls take at most 0.2 s. A search that is quadratic in 30,000 characters takes over 3 s."""
    text = around.format(flood)
    began = time.process_time()
    answers.is_answer(text, "7")
    answers.is_answer(text, "Paris")
    answers.same_text(answers.answer_of(text), "B")
    answers.integer_of(text)
    answers.vote(text)
    answers.in_base(text)
    answers.brackets(text)
    assert time.process_time() - began < 1.5


@pytest.mark.parametrize(
    ("text", "numeral"),
    [
        *(("10_{3}", ("10", 3)), (r"1F_{16}", ("1F", 16)), ("10_2", ("10", 2))),
        *(("x_1", None), ("a_{12}", None), ("12_2", None), ("10", None), ("1_1", None), (r"\(10_{3}\)", ("10", 3))),
        *((r"257_{\text{eight}}", ("257", 8)), ("10\u2083", ("10", 3))),
    ],
)
def test_numerals_with_a_base(text, numeral):
    assert answers.in_base(text) == numeral
