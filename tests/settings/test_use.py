"""Functions as settings: how a setting chooses one, what its keywords may be, and which errors name a bad choice."""

import dataclasses
import hashlib
import json
import pathlib
from typing import Literal

import ml_collections
import pytest
from support import refusal
from support.refusal import ANY

from jaxrl_llm.settings.schema import (
    AtLeastOne,
    ConfigError,
    Count,
    CountOrZero,
    Decay,
    Exponent,
    NotNegative,
    Number,
    OverOneOrZero,
    Positive,
    Share,
    Text,
    build,
    convert,
    flatten,
)
from jaxrl_llm.settings.use import Chosen, Facts, Slot, declare, keywords, slot, use


@dataclasses.dataclass(frozen=True)
class FactsOfTests(Facts):
    base: str = ""
    siblings: bool = False
    limit: int = 0


def plain(x):
    return x


@declare(siblings=True, base="old", limit=3)
def scaled(
    x, *, scale: Positive = 2.0, kind: Literal["a", "b"] = "a", times: Count = 1, shift=0.5, is_on: bool = False
):
    return x * scale * times + shift


def demanding(x, *, limit: Share):
    return min(x, limit)


TABLE = {"plain": plain, "scaled": scaled, "demanding": demanding}
ONE = Slot(TABLE, "x", FactsOfTests)
OPTIONAL = Slot(TABLE, "x", FactsOfTests, optional=True, settings={"coefficient": (NotNegative, 0.25)})
SEVERAL = Slot(TABLE, "x", FactsOfTests, several=True)
DEFAULTS = {"scale": 2.0, "kind": "a", "times": 1, "shift": 0.5, "is_on": False}


def refused(place, value, field, field_value=ANY, *words, default=None):
    """Assert that ``place`` refuses ``value`` as ``field=field_value``, and return the message."""
    with refusal.refused(field, field_value, *words) as error:
        place.choose(value, "a.b", default)
    return str(error.value)


# ---- choice


@pytest.mark.parametrize("value", ["scaled", {"name": "scaled"}, use("scaled"), Text("scaled")])
def test_a_name_alone_is_the_function_with_its_defaults(value):
    chosen = ONE.choose(value, "a.b")
    assert chosen.function is scaled
    assert chosen == Chosen("scaled", DEFAULTS)
    assert chosen.source == ""


@pytest.mark.parametrize("make", [dict, ml_collections.ConfigDict, ml_collections.FrozenConfigDict])
def test_a_mapping_has_its_settings_beside_the_name(make):
    chosen = ONE.choose(make({"name": "scaled", "scale": 3, "kind": "b", "is_on": True}), "a.b")
    assert chosen.settings == DEFAULTS | {"scale": 3.0, "kind": "b", "is_on": True}
    assert type(chosen["scale"]) is float
    assert chosen(5.0) == 15.5
    assert use("scaled", scale=3).to_dict() == {"name": "scaled", "scale": 3}
    # What is chosen already stays what it is.
    assert ONE.choose(chosen, "a.b") is chosen


def test_a_mapping_without_a_name_is_of_the_default():
    default = ONE.choose(use("scaled", scale=7.0), "a.b")
    chosen = ONE.choose({"times": 2}, "a.b", default)
    # The default function, not the default's settings.
    assert chosen == Chosen("scaled", DEFAULTS | {"times": 2})
    refused(ONE, {"scales": 1.0}, "a.b.scales", 1.0, "'scaled'", default=default)


def test_a_function_that_is_not_in_the_table_is_named_with_those_that_are():
    refused(ONE, "scale", "a.b", "scale", "'plain'", "'scaled'", "'demanding'", "'path/to/file.py:function'")
    refused(ONE, "none", "a.b", "none")
    refused(OPTIONAL, "scale", "a.b", "scale", "'plain'", "'scaled'", "'demanding'", "'none'")
    refused(ONE, {"scale": 1.0}, "a.b", "")


@pytest.mark.parametrize("value", [3, None, ["plain"], {"name": 3}, {"name": None, "scale": 1.0}])
def test_what_names_no_function_at_all_is_refused(value):
    refused(ONE, value, "a.b", value, "use(NAME, ...)", "'plain'", "'scaled'", "'demanding'")


def test_a_slot_that_may_stay_empty_has_its_own_settings_where_it_is_not():
    chosen = OPTIONAL.choose({"name": "scaled", "coefficient": 1, "scale": 3.0}, "a.b")
    assert chosen.settings == {"coefficient": 1.0, **DEFAULTS, "scale": 3.0}
    assert chosen(2.0) == 6.5  # the function is not given the slot's
    assert chosen
    assert OPTIONAL.choose("plain", "a.b").settings == {"coefficient": 0.25}
    refused(OPTIONAL, use("plain", coefficient=-1.0), "a.b.coefficient", -1.0, "0.0")
    empty = OPTIONAL.choose("none", "a.b")
    assert not empty
    assert empty == Chosen("none")
    assert empty.facts == FactsOfTests()
    refused(OPTIONAL, use("none", scale=1.0), "a.b.scale", 1.0, "a.b='none'", "'plain'")


def test_a_setting_of_a_slot_that_is_empty_by_default_says_so():
    empty = OPTIONAL.choose("none", "a.b")
    refused(OPTIONAL, {"scale": 1.0}, "a.b.scale", 1.0, "a.b='none'", default=empty)


def test_several_are_taken_in_order():
    for value in (["plain", use("scaled", scale=3.0)], (use("plain"), {"name": "scaled", "scale": 3.0})):
        chosen = SEVERAL.choose(value, "a.b")
        assert [one.name for one in chosen] == ["plain", "scaled"]
        assert chosen[1]["scale"] == 3.0
    assert SEVERAL.choose((), "a.b") == ()
    assert SEVERAL.choose(chosen, "a.b") == chosen


def test_of_several_each_is_refused_by_its_place_and_none_comes_twice():
    twice = ["plain", use("scaled", scale=2.0), use("scaled", scale=3.0)]
    refused(SEVERAL, ["scaled", "scaled"], "a.b", ("scaled", "scaled"))
    refused(SEVERAL, twice, "a.b", ("plain", "scaled", "scaled"))
    refused(SEVERAL, ["plain", "other"], "a.b[1]", "other", "'plain'")
    refused(SEVERAL, [use("scaled", scale=0.0)], "a.b[0].scale", 0.0)
    for value in ("plain", {"name": "plain"}, 3, None, Chosen("plain")):
        refused(SEVERAL, value, "a.b", value, "use(NAME, ...)")


# ---- settings


def test_a_setting_that_the_function_does_not_have_is_named_with_what_was_meant():
    refused(ONE, use("scaled", scal=3.0), "a.b.scal", 3.0, "'scaled'", "mean scale")
    refused(ONE, use("scaled", zzz=1), "a.b.zzz", 1, "scale", "kind", "times", "shift", "is_on")
    refused(ONE, use("plain", scale=3.0), "a.b.scale", 3.0, "'plain'")
    refused(OPTIONAL, use("plain", coeficient=3.0), "a.b.coeficient", 3.0, "coefficient")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"scale": "x"}, ("a.b.scale", "x")),
        ({"scale": None}, ("a.b.scale", None)),
        ({"scale": True}, ("a.b.scale", True)),
        ({"times": 1.0}, ("a.b.times", 1.0)),
        ({"times": True}, ("a.b.times", True)),
        ({"is_on": 1}, ("a.b.is_on", 1)),
        ({"shift": "x"}, ("a.b.shift", "x")),  # as its default is
        ({"kind": "c"}, ("a.b.kind", "c")),
        ({"kind": 1}, ("a.b.kind", 1)),
        ({"scale": 0.0}, ("a.b.scale", 0.0)),
        ({"scale": -1}, ("a.b.scale", -1.0)),
        ({"scale": float("nan")}, ("a.b.scale", float("nan"))),
        ({"scale": float("inf")}, ("a.b.scale", float("inf"))),
        ({"scale": 1e-30}, ("a.b.scale", 1e-30)),
        ({"shift": 1e13}, ("a.b.shift", 1e13)),
        ({"times": 0}, ("a.b.times", 0)),
        ({"times": 2**31}, ("a.b.times", 2**31)),
    ],
)
def test_a_value_of_another_type_or_out_of_bounds_is_refused(settings, named):
    refused(ONE, use("scaled", **settings), *named)


@pytest.mark.parametrize(
    ("kind", "allowed", "not_allowed"),
    [
        (Number, [-1e12, 0, 1e12], [-2e12, 2e12, float("nan")]),
        (Positive, [1e-20, 1e12], [0, -1, 2e12]),
        (NotNegative, [0, 1e12], [-1e-9, 2e12]),
        (Share, [0, 0.5, 1], [-0.1, 1.1]),
        (Decay, [0, 0.9999], [-0.1, 0.99999, 1]),
        (AtLeastOne, [1, 100], [0, 0.99]),
        (OverOneOrZero, [0, 1.01, 3], [1, 0.5, -1]),
        (Exponent, [0, 100], [-1, 101]),
        (Count, [1, 2**31 - 1], [0, -1, 2**31]),
        (CountOrZero, [0, 2**31 - 1], [-1, 2**31]),
    ],
)
def test_kinds_of_numbers(kind, allowed, not_allowed):
    for value in allowed:
        assert convert(kind, value, "a") == value
    for value in not_allowed:
        with refusal.refused("a", type(allowed[0])(value) if kind in (Count, CountOrZero) else float(value)):
            convert(kind, value, "a")
    if kind is OverOneOrZero:
        with refusal.refused("a", 1.0, "1000000000000.0", "or 0"):
            convert(kind, 1, "a")


def test_a_setting_without_a_default_must_be_given():
    refused(ONE, "demanding", "a.b.limit", ANY, "'demanding'")
    assert ONE.choose(use("demanding", limit=1), "a.b")(5.0) == 1.0
    refused(ONE, use("demanding", limit=2.0), "a.b.limit", 2.0, "0.0", "1.0")


def test_settings_are_the_keyword_only_arguments_and_each_is_of_its_own_type():
    assert [(name, default) for name, (_, default) in keywords(scaled).items()] == [*DEFAULTS.items()]
    assert keywords(scaled)["shift"] == (Number, 0.5)
    assert keywords(plain) == {}

    def listed(x, *, sizes: tuple[int, ...] = (1, 2)):
        return x

    listing = Slot({"listed": listed}, "x")
    assert listing.choose("listed", "a.b")["sizes"] == (1, 2)
    assert hash(listing.choose(use("listed", sizes=[3]), "a.b")) == hash(Chosen("listed", {"sizes": (3,)}))
    refused(listing, use("listed", sizes=[3, "x"]), "a.b.sizes[1]", "x", "int")


# ---- as a command line has them


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("scale", "3", 3.0),
        ("scale", "1e-3", 0.001),
        ("times", "3", 3),
        ("kind", "b", "b"),
        ("shift", "-2", -2.0),
        ("is_on", "true", True),
        ("is_on", "False", False),
    ],
)
def test_text_is_what_the_settings_type_says(name, text, value):
    chosen = ONE.choose({"name": Text("scaled"), name: Text(text)}, "a.b")
    assert chosen == Chosen("scaled", DEFAULTS | {name: value})
    assert isinstance(chosen[name], type(value))


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("scale", "x", ("a.b.scale", "x")),
        ("scale", "0", ("a.b.scale", 0.0)),
        ("scale", "nan", ("a.b.scale", float("nan"))),
        ("times", "1.5", ("a.b.times", 1.5)),
        ("kind", "c", ("a.b.kind", "c")),
        ("is_on", "yes", ("a.b.is_on", "yes")),
    ],
)
def test_text_of_another_type_is_refused(name, text, named):
    refused(ONE, {"name": "scaled", name: Text(text)}, *named)


@pytest.mark.parametrize("text", ["plain,scaled", "plain, scaled,", "('plain', 'scaled')", "[plain,scaled]"])
def test_text_names_several_with_commas(text):
    assert [one.name for one in SEVERAL.choose(Text(text), "a.b")] == ["plain", "scaled"]


def test_text_names_none_or_one():
    assert SEVERAL.choose(Text(""), "a.b") == SEVERAL.choose(Text("()"), "a.b") == ()
    assert [one.name for one in SEVERAL.choose(Text("plain"), "a.b")] == ["plain"]
    refused(SEVERAL, Text("plain,plain"), "a.b", ("plain", "plain"))
    refused(SEVERAL, Text("plain,other"), "a.b[1]", "other")


# ---- what is declared


def test_declared_facts_are_the_record_of_the_slot():
    chosen = ONE.choose("scaled", "a.b")
    assert chosen.facts == FactsOfTests(base="old", siblings=True, limit=3)
    assert ONE.choose("plain", "a.b").facts == FactsOfTests()
    assert scaled(1.0) == 2.5  # the decorator returns the same function


@pytest.mark.parametrize(
    ("facts", "named"),
    [({"sibling": True}, ("sibling", True, "siblings")), ({"siblings": "yes"}, ("siblings", "yes", "True or False"))],
)
def test_a_table_with_an_unknown_fact_is_refused(facts, named):
    table = {"wrong": declare(**facts)(lambda x: x)}
    with refusal.refused(*named, "'wrong'"):
        Slot(table, "x", FactsOfTests)


# ---- what is chosen


def test_it_says_its_name_and_its_settings():
    assert str(ONE.choose("plain", "a.b")) == "plain"
    said = str(ONE.choose(use("scaled", scale=3, kind="b"), "a.b"))
    assert said == "scaled(scale=3.0, kind='b', times=1, shift=0.5, is_on=False)"
    assert str(OPTIONAL.choose("none", "a.b")) == "none"


def test_it_is_equal_to_another_of_the_same_name_settings_and_file():
    make = lambda **settings: ONE.choose(use("scaled", **settings), "a.b")
    one, same, other = make(scale=3), make(times=1, scale=3.0), make(scale=4)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert len({one, same, other, ONE.choose("plain", "a.b")}) == 3
    assert one != dataclasses.replace(one, source="abc")
    # In whatever order the settings stand.
    turned = Chosen("scaled", dict(reversed(one.settings.items())))
    assert turned == one
    assert hash(turned) == hash(one)


def test_its_settings_are_read_by_name_and_replaced_in_another():
    chosen = ONE.choose("scaled", "a.b")
    assert chosen["scale"] == 2.0
    with pytest.raises(KeyError):
        chosen["power"]
    moved = chosen.replace(scale=5.0)
    assert moved(1.0) == 5.5
    assert moved.settings == DEFAULTS | {"scale": 5.0}
    assert chosen["scale"] == 2.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.name = "plain"


def test_its_mapping_makes_it_again():
    chosen = OPTIONAL.choose(use("scaled", scale=3.0, coefficient=0.5), "a.b")
    assert chosen.mapping() == {"name": "scaled", "coefficient": 0.5, **DEFAULTS, "scale": 3.0}
    again = OPTIONAL.choose(json.loads(json.dumps(chosen.mapping())), "a.b")
    assert again == chosen
    assert again.function is scaled
    assert OPTIONAL.choose(OPTIONAL.choose("none", "a.b").mapping(), "a.b") == Chosen("none")


# ---- a field of a config


@dataclasses.dataclass(frozen=True)
class Settings:
    first: Chosen = slot(TABLE, "x", "scaled", facts=FactsOfTests)
    second: Chosen = slot(TABLE, "x", facts=FactsOfTests, settings={"coefficient": (NotNegative, 0.25)})
    more: tuple[Chosen, ...] = slot(TABLE, "x", (), facts=FactsOfTests, several=True)


def test_fields_of_a_config_have_paths_and_defaults():
    config = Settings()
    assert config.first.function is scaled
    assert not config.second
    assert config.more == ()
    built = build(Settings, {"first": {"times": 3}, "second": "plain", "more": ["plain", use("scaled", scale=4.0)]})
    flat = flatten(built)
    assert flat["first"] == "scaled"
    assert flat["first.times"] == 3
    assert flat["second"] == "plain"
    assert flat["second.coefficient"] == 0.25
    assert flat["more"] == ("plain", "scaled")
    assert flat["more.scaled.scale"] == 4.0
    assert flatten(built, whole=True) == {"first": built.first, "second": built.second, "more": built.more}
    with refusal.refused("first", "none", "'plain', 'scaled', 'demanding'"):
        build(Settings, {"first": "none"})
    with refusal.refused("more[1].kind", "c", "'a', 'b'"):
        build(Settings, {"more": ["plain", use("scaled", kind="c")]})


# ---- functions of the user's own

OWN = """
from jaxrl_llm.settings.schema import Share
from jaxrl_llm.settings.use import declare

NUMBER = 3


@declare(base="old")
def halved(x, *, by: float = 2.0, share: Share = 1.0):
    return share * x / by


@declare(bases="old")
def declaring(x):
    return x


def two(x, y):
    return x


def none():
    return 0


def by_place(x, scale=2.0):
    return x


def starred(*x):
    return x


def starred_more(x, *more):
    return x


def keyed(x, **settings):
    return x


def puzzling(x, *, by: "Unheard" = 2.0):
    return x


class Halved:
    def __call__(self, x, *, by: float = 2.0):
        return x / by


halver = Halved()
"""


def test_a_function_of_a_file_is_one_like_those_of_the_table(own):
    chosen = ONE.choose(f"{own}:halved", "a.b")
    assert chosen.name == f"{own}:halved"
    assert chosen.settings == {"by": 2.0, "share": 1.0}
    assert chosen(6.0) == 3.0
    assert chosen.facts == FactsOfTests(base="old")
    assert str(chosen) == f"{own}:halved(by=2.0, share=1.0)"
    assert OPTIONAL.choose(use(f"{own}:halved", by=4), "a.b").settings == {"coefficient": 0.25, "by": 4.0, "share": 1.0}
    texts = SEVERAL.choose(Text(f"plain,{own}:halved"), "a.b")
    assert [one.name for one in texts] == ["plain", f"{own}:halved"]
    refused(ONE, use(f"{own}:halved", share=2.0), "a.b.share", 2.0, "0.0", "1.0")
    refused(ONE, use(f"{own}:halved", bye=2.0), "a.b.bye", 2.0, f"'{own}:halved'", "mean by")
    # One of a package on the import path, by its module.
    assert ONE.choose("jaxrl_llm.algorithms.corrections:importance", "a.b").source


def test_a_file_that_leaves_moves_or_speaks_when_imported_does_so_for_no_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(5)\n")
    refused(ONE, "leaves.py:f", "a.b", "leaves.py:f", "SystemExit: 5")
    (tmp_path / "moves.py").write_text(f"import os\nos.chdir('/')\nprint('loading')\n{OWN}")
    assert ONE.choose("moves.py:halved", "a.b").function and pathlib.Path.cwd() == tmp_path
    assert capsys.readouterr() == ("", "loading\n")


def test_the_digest_of_its_file_is_a_part_of_it(own, tmp_path):
    chosen = ONE.choose(f"{own}:halved", "a.b")
    assert chosen.source == hashlib.sha256(OWN.encode()).hexdigest()[:16]
    assert chosen.mapping() == {"name": f"{own}:halved", "by": 2.0, "share": 1.0, "source": chosen.source}
    assert ONE.choose(chosen.mapping(), "a.b") == chosen
    assert ONE.choose("plain", "a.b").source == ""
    other = tmp_path / "other.py"
    other.write_text(OWN + "\n")
    assert ONE.choose(f"{other}:halved", "a.b").source != chosen.source


def test_a_run_keeps_the_digest_that_it_was_made_with(own):
    recorded = ONE.choose({"name": f"{own}:halved", "by": 3.0, "source": "0123456789abcdef"}, "a.b")
    assert recorded.source == "0123456789abcdef"
    assert recorded != ONE.choose(use(f"{own}:halved", by=3.0), "a.b")
    # Of the table's there is none, whatever is said.
    assert ONE.choose({"name": "plain", "source": "0123456789abcdef"}, "a.b") == Chosen("plain")


def test_a_run_of_elsewhere_is_read_without_its_file_and_not_run(tmp_path):
    gone = {"name": f"{tmp_path / 'gone.py'}:halved", "by": 3.0, "source": "0123456789abcdef"}
    chosen = ONE.choose(gone, "a.b")
    assert chosen.function is None
    assert chosen.mapping() == gone
    assert chosen.facts == FactsOfTests()
    with refusal.raises_with(ConfigError, gone["name"]):
        chosen(1.0)
    del gone["source"]
    refused(ONE, gone, "a.b", gone["name"], "FileNotFoundError")


def test_a_function_of_a_file_with_an_unknown_fact_is_refused(own):
    refused(ONE, f"{own}:declaring", "a.b", f"{own}:declaring", "bases='old'", "mean base")


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("two", "(x, y)"),
        ("none", "()"),
        ("by_place", "(x, scale=2.0)"),
        ("starred", "(*x)"),
        ("starred_more", "(x, *more)"),
        ("keyed", "(x, **settings)"),
    ],
)
def test_one_that_takes_something_else_is_refused(own, name, signature):
    refused(ONE, f"{own}:{name}", "a.b", f"{own}:{name}", "(x)", signature)


def test_its_arguments_are_as_many_as_those_of_its_place(own):
    place = Slot({}, "advantage, rows", FactsOfTests)
    assert place.choose(f"{own}:two", "a.b")(1, 2) == 1
    refused(place, f"{own}:halved", "a.b", f"{own}:halved", "(advantage, rows)", "(x, *, by")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("own.py:missing", "AttributeError: module"),
        ("own.py:NUMBER", "TypeError: NUMBER is not a function but int"),
        ("own.py:halver", "TypeError: "),  # the arguments of an object cannot be read
        ("own.py:puzzling", "NameError: name 'Unheard' is not defined"),
        ("absent.py:halved", "FileNotFoundError: no file"),
        ("raising.py:halved", "ZeroDivisionError: division by zero"),
        ("broken.py:halved", "SyntaxError: "),
        ("own.py:", "ValueError: must be 'package.module:function' or 'path/to/file.py:function'"),
    ],
)
def test_one_that_cannot_be_found_is_refused_with_the_reason(own, name, reason):
    (own.parent / "raising.py").write_text("1 / 0\n\n\ndef halved(x):\n    return x\n")
    (own.parent / "broken.py").write_text("def halved(x:\n")
    refused(ONE, f"{own.parent}/{name}", "a.b", f"{own.parent}/{name}", reason)


def test_one_of_a_package_that_is_not_there_is_refused():
    refused(ONE, "no_such_package:f", "a.b", "no_such_package:f", "ModuleNotFoundError")
    refused(ONE, ":f", "a.b", ":f", "ValueError")


def test_what_it_raises_is_said_with_its_line_and_what_ours_raise_stays(own):
    chosen = ONE.choose(use(f"{own}:halved", by=0.0), "a.b")
    line = 1 + OWN.splitlines().index("    return share * x / by")
    with refusal.raises_with(ConfigError, "own.py:halved", f"line {line}", "ZeroDivisionError") as error:
        chosen(1.0)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(TypeError):
        ONE.choose("scaled", "a.b")("x")
