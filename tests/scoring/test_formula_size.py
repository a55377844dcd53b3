"""The bound on a formula's numbers: formulas that are too large to compute are found by reading alone."""

import time

import pytest

from jaxrl_llm.scoring.formula_size import is_computable, name_of

TOO_LARGE = [
    r"9^{9^{9}}",
    "9^9^9",
    "9**9**9",
    "9 ^ 9 ^ 9",
    "9^{+9^{9}}",
    "-9^{9^9}",
    r"{9}^{{9}^{9}}",
    r"9^\frac{9^9}{2}",
    r"9^\sqrt{10^{20}}",
    r"9^{\frac{10^{10}}{2}}",
    "9^{20!}",
    "(9^9)^(9^9)",
    r"10^{10^{10}}",
    r"10^{-10^{10}}",
    r"2^{2^{2^{40}}}",
    "2**2**2**40",
    "(10^9)!",
    "10^{9}!",
    r"\left(10^{9}\right)!",
    "((100!)!)",
    "99999!",
    "factorial(10**9)",
    r"\Gamma(10^9)",
    r"\binom{10^9}{5*10^8}",
    r"\binom{10^{9}}{500000000}",
    "binomial(10**9, 5*10**8)",
    r"\sum_{i=1}^{10^{9}} i^i",
    r"\sum_{i=1}^{1000000000} \frac{1}{i}",
    r"\prod_{i=1}^{10^9} i",
    r"\prod_{i=1}^{9999} 9^{999}",
    "1e999999999",
    "1e-999999999",
    "9" * 5000,
    "0." + "0" * 5000 + "1",
    r"\frac{1}{" * 1000 + "2" + "}" * 1000,
    r"\frac{1}{" * 20 + "2" + "}" * 20,
    "{" * 30 + "2" + "}" * 30,
    "(" * 100_000,
    "[" * 5000 + "1" + "]" * 5000,
    "1+" * 2000 + "1",
    r"\begin{pmatrix}" + "1&" * 5000 + r"1\end{pmatrix}",
    r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{10^9}",
    r"e^{10^{10}}",
    r"\exp(10^{10})",
    r"x^{10^{10}}",
    r"(x+1)^{99999999}",
    r"0.1^{10^9}",
    r"(1/2)^{10^9}",
    r"7^{10^{10}} \mod 13",
    r"\sqrt[3]{9^{9^9}}",
    r"|9^{9^9}|",
    r"\lfloor 9^{9^9} \rfloor",
    r"x_{9^{9^9}}",
    r"5+0\cdot 9^{9^9}",
    r"\frac{9^{9^9}}{9^{9^9}}",
    r"9^{9^{9}",
    "9^{9^9}}}}",
]
COMPUTABLE = [
    *("", "4", "-5", "1/2", "1,000,000", "6.02e23", "1e-8", "0!", "3!", "100!", "1000!", "10!!", "n!"),
    *(r"\frac{1}{2}", "2^{100}", "2^{1000}", "2^{-100}", "10^{100}", r"2^{2^{10}}", r"3 \cdot 10^{8}"),
    *("x^2+2x+1", "(x+1)^{2024}", "x^{2024}", "2^{n+1}-1", r"\frac{n!}{k!(n-k)!}", r"e^{i\pi}", r"e^{-x^2}"),
    *(r"\binom{100}{50}", r"\binom{10^9}{2}", r"\sum_{i=1}^{2024} i", r"\sum_{n=1}^{\infty} \frac{1}{n^2}"),
    *(r"\frac{1}{2+\frac{1}{3+\frac{1}{4}}}", r"\int_0^1 x^2 dx", r"\sqrt{2}", r"\log_{10} 5", r"90^\circ"),
    *(r"\{1,2,3\}", "[0,1)", "(3, 4)", r"x \in (-\infty, 2]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    *(r"(-1)^{10^{10}}", r"1^{9^9}", r"7^{1000} \mod 13", r"\text{Paris}", "1," * 200),
    *("$", "}", "^", "_", "!", "^^^", "!!!", "((((", r"\frac", r"\binom", r"\sum", r"\sum_{i", r"\boxed{", "x^{"),
]


@pytest.mark.parametrize("formula", TOO_LARGE, ids=lambda formula: formula[:24])
def test_formulas_beyond_the_bound_are_found_at_once(formula):
    began = time.monotonic()
    assert not is_computable(formula)
    assert time.monotonic() - began < 1.0


def test_formulas_that_people_write_are_within_the_bound():
    assert [formula for formula in COMPUTABLE if not is_computable(formula)] == []


def test_the_name_of_a_formula_is_that_of_its_text_and_holds_no_number():
    names = [name_of(text) for text in ("9^{9^{9}}", "9^{ 9^{9} }", r"9^\left(9^{9}\right)", "9**(9**(9))")]
    assert len(set(names)) == 1 and names[0] != name_of("9^{9^{8}}")
    assert not any(letter.isdigit() for letter in names[0])
