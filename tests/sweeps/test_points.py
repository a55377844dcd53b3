"""Points of a sweep: how they are made and named, and that a wrong point is named before anything runs."""

import re

import pytest
from support.refusal import ANY, raises_with, refused

from jaxrl_llm.config import Config, ConfigError, defaults, freeze, from_json, to_json
from jaxrl_llm.settings.use import use
from jaxrl_llm.sweeps.points import (
    Sweep,
    freeze_points,
    grid,
    log_uniform,
    point_name,
    product,
    random,
    seeds,
    uniform,
    with_point,
    zipped,
)


def test_each_way_to_make_points_gives_what_one_writes_by_hand():
    assert grid({"a": [1, 2], "b.c": ["x", "y"]}) == [
        {"a": 1, "b.c": "x"},
        {"a": 1, "b.c": "y"},
        {"a": 2, "b.c": "x"},
        {"a": 2, "b.c": "y"},
    ]
    assert grid({}) == [{}]
    assert zipped({"a": [1, 2], "b": [3, 4]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    assert seeds(2) == [{"seed": 0}, {"seed": 1}] and seeds(2, first=5) == [{"seed": 5}, {"seed": 6}]
    assert product([{"a": 1}, {"b": 2}], seeds(2)) == [
        {"a": 1, "seed": 0},
        {"a": 1, "seed": 1},
        {"b": 2, "seed": 0},
        {"b": 2, "seed": 1},
    ]


def test_parts_that_do_not_fit_are_refused():
    with raises_with(ConfigError, "{'a': 1, 'b': 2}"):
        zipped({"a": [1], "b": [3, 4]})
    with refused("seed"):
        product(seeds(2), seeds(2))


def test_random_points_are_of_the_seed_and_their_place_alone():
    choices = {"a": ["x", "y", "z"], "b": log_uniform(1e-4, 1e-2), "c": uniform(2, 3)}
    points = random(choices, num=40, seed=0)
    assert points[:10] == random(choices, num=10, seed=0) != random(choices, num=10, seed=1)
    assert {point["a"] for point in points} == {"x", "y", "z"}
    assert all(1e-4 <= point["b"] < 1e-2 and 2 <= point["c"] < 3 for point in points)
    # Half of the logarithms below the middle: fewer than 8 or more than 32 of 40 has probability 1e-4.
    assert 8 <= sum(point["b"] < 1e-3 for point in points) <= 32
    freeze_points({}, random({"optimizer.learning_rate": log_uniform(1e-4, 1e-2)}, num=2, seed=0))


def test_a_name_is_of_the_point_alone_and_stays():
    point = {"seed": 3, "replay.capacity": 128}
    # A change of these names would orphan the runs people have.
    assert point_name(point) == point_name(dict(reversed(point.items()))) == "capacity=128_seed=3_2362e89a"
    assert point_name({}).startswith("base_")
    name = point_name({"model.path": "a/b c'$" + "x" * 200})
    assert re.fullmatch(r"path=a_b_c_x+_[0-9a-f]{8}", name) and len(name) < 100
    assert point_name({"model.path": "a/b"}) != point_name({"model.path": "a_b"})


def test_points_become_configs_and_one_that_is_there_twice_is_one():
    base = {"prompts": {"arguments": {"a": 1}}, "num_iterations": 5}
    points = [{"seed": 1}, {"update.batch_size": 32, "prompts.arguments.b": 2}, {"seed": 1}]
    frozen = freeze_points(base, points)
    assert [point for point, _ in frozen.values()] == points[:2]
    first, second = (config for _, config in frozen.values())
    assert (first.seed, first.num_iterations, second.update.batch_size) == (1, 5, 32)
    assert second.prompts.arguments == {"a": 1, "b": 2} and first.prompts.arguments == {"a": 1}
    assert base == {"prompts": {"arguments": {"a": 1}}, "num_iterations": 5}
    assert freeze(with_point({}, {})) == Config()


def a_method():
    """Return a get_config() with chosen functions."""
    config = defaults()
    config.algorithm.surrogate = use("cispo", high=4.0)
    config.algorithm.reward_terms = [use("length_reward", weight=0.3)]
    return config


CLIPPED = {"low": 0.2, "high": 0.2, "dual": 0.0}


@pytest.mark.parametrize(
    ("point", "name", "settings"),
    [
        ({}, "cispo", {"low": 0.0, "high": 4.0}),
        ({"algorithm.surrogate.high": 3}, "cispo", {"low": 0.0, "high": 3.0}),
        ({"algorithm.surrogate": "cispo"}, "cispo", {"low": 0.0, "high": 5.0}),  # named anew, with its defaults
        ({"algorithm.surrogate": "clipped"}, "clipped", CLIPPED),
        ({"algorithm.surrogate": "clipped", "algorithm.surrogate.high": 0.3}, "clipped", CLIPPED | {"high": 0.3}),
        ({"algorithm.surrogate.high": 0.3, "algorithm.surrogate": "clipped"}, "clipped", CLIPPED | {"high": 0.3}),
        ({"algorithm.surrogate": {"name": "clipped", "low": 0.1}}, "clipped", CLIPPED | {"low": 0.1}),
        ({"algorithm.surrogate": {"high": 0.3}}, "clipped", CLIPPED | {"high": 0.3}),  # of the default function
        (
            {"algorithm.surrogate": {"name": "clipped", "low": 0.1}, "algorithm.surrogate.dual": 3},
            "clipped",
            {"low": 0.1, "high": 0.2, "dual": 3.0},
        ),
    ],
)
def test_a_point_chooses_a_function_and_its_settings(point, name, settings):
    base = a_method()
    before = base.to_json()
    ((_, config),) = freeze_points(base, [point]).values()
    assert (config.algorithm.surrogate.name, dict(config.algorithm.surrogate.settings)) == (name, settings)
    assert [dict(term.settings) for term in config.algorithm.reward_terms] == [{"weight": 0.3}]
    assert from_json(to_json(config)) == config and base.to_json() == before


@pytest.mark.parametrize(
    ("point", "terms"),
    [
        ({"algorithm.reward_terms": []}, {}),
        ({"algorithm.reward_terms": ["overlong_penalty"]}, {"overlong_penalty": {"buffer": 4}}),
        (
            {"algorithm.reward_terms": ["overlong_penalty", {"name": "length_reward", "weight": 0.2}]},
            {"overlong_penalty": {"buffer": 4}, "length_reward": {"weight": 0.2}},
        ),
        (
            {
                "algorithm.reward_terms.overlong_penalty.buffer": 1,
                "algorithm.reward_terms": ("overlong_penalty", "length_reward"),
            },
            {"overlong_penalty": {"buffer": 1}, "length_reward": {"weight": 0.1}},
        ),
        ({"algorithm.reward_terms.length_reward.weight": 0.2}, {"length_reward": {"weight": 0.2}}),
        (
            {"algorithm.reward_terms.overlong_penalty.buffer": 1},
            {"length_reward": {"weight": 0.3}, "overlong_penalty": {"buffer": 1}},
        ),
    ],
)
def test_a_point_chooses_a_list_of_functions_and_settings_of_one(point, terms):
    base = a_method()
    before = base.to_json()
    ((_, config),) = freeze_points(base, [point]).values()
    assert {term.name: dict(term.settings) for term in config.algorithm.reward_terms} == terms
    assert config.algorithm.surrogate["high"] == 4.0
    assert from_json(to_json(config)) == config and base.to_json() == before


def test_points_of_functions_have_names_of_their_own():
    choices = ["clipped", "cispo", {"name": "cispo", "high": 3.0}, {"name": "cispo", "high": 4.0}]
    points = [
        *grid({"algorithm.surrogate": choices}),
        {"algorithm.surrogate": "cispo", "algorithm.surrogate.high": 3.0},
    ]
    points += [{"algorithm.reward_terms": terms} for terms in ([], ["length_reward"])]
    frozen = freeze_points(a_method(), points)
    assert [point for point, _ in frozen.values()] == points
    assert all(re.fullmatch(r"[A-Za-z][A-Za-z0-9._=+-]*_[0-9a-f]{8}", name) and len(name) < 100 for name in frozen)
    assert [name.rpartition("_")[0] for name in frozen][:2] == ["surrogate=clipped", "surrogate=cispo"]


def test_functions_in_lists_are_functions():
    terms = (use("length_reward", weight=0.2), "overlong_penalty")
    plainly = [{"name": "length_reward", "weight": 0.2}, "overlong_penalty"]
    points = grid({"algorithm.reward_terms": [(), terms, list(terms), plainly]})
    (empty, _), (point, config) = freeze_points({}, points).values()  # the last three are one
    assert (empty, point) == ({"algorithm.reward_terms": ()}, {"algorithm.reward_terms": plainly})
    assert {x.name: dict(x.settings) for x in config.algorithm.reward_terms} == {
        "length_reward": {"weight": 0.2},
        "overlong_penalty": {"buffer": 4},
    }


@pytest.mark.parametrize("bucket", ["gs://mine/sweep", "gs://mine/sweep/"])
def test_each_point_has_a_folder_of_the_bucket_that_no_other_has(bucket):
    points = [*grid({"optimizer.learning_rate": [1e-5, 2e-5]}), {"checkpoint.bucket": "gs://other/one", "seed": 1}]
    frozen = freeze_points({"checkpoint": {"bucket": bucket}}, points)
    places = [config.checkpoint.bucket for _, config in frozen.values()]
    folders = [name.replace("=", "_") for name in frozen]
    assert places == [f"gs://mine/sweep/{folders[0]}", f"gs://mine/sweep/{folders[1]}", f"gs://other/one/{folders[2]}"]
    assert all(re.fullmatch(r"gs://[a-z]+(/[\w.-]+)+", place) for place in places)  # as ``bucket.place`` has them
    # The same however many points there are: a sweep that grows goes on.
    assert freeze_points({"checkpoint": {"bucket": bucket}}, points[:1]) == dict([*frozen.items()][:1])


@pytest.mark.parametrize(
    ("point", "given", "is_refused"),
    [
        ({"seed": 0}, "seed", True),
        ({"algorithm.surrogate": "cispo"}, "algorithm.surrogate.high", True),
        ({"algorithm.surrogate.high": 0.3}, "algorithm.surrogate", True),
        ({"algorithm.surrogate.high": 0.3}, "algorithm.surrogate.low", False),
        ({"replay.capacity": 128}, "replay.capacity_tokens", False),
        ({"eval.num_samples": 2}, "eval.num_prompts", False),
    ],
)
def test_what_points_set_is_not_for_the_command_line(point, given, is_refused):
    if not is_refused:
        assert freeze_points({}, [point], ["num_iterations", given]) == freeze_points({}, [point])
        return
    (field,) = point
    with refused(f"--config.{given}", ANY, str(point), f" {field}"):
        freeze_points({}, [point], ["num_iterations", given])


@pytest.mark.parametrize(
    ("point", "named"),
    [
        ({"update.bach_size": 4}, ("update.bach_size", 4, "update.batch_size")),
        ({"seed.x": 4}, ("seed", {"x": 4})),
        ({"seed": -1}, ("seed", -1)),
        ({"seed": 1.5}, ("seed", 1.5)),
        ({"update.batch_size": 24}, ("update.micro_batch_size", 16, "update.batch_size=24")),
        ({"prompts.arguments": {"a": object()}}, ("point", ANY, "JSON")),
        ({"algorithm.surrogate": "cipso"}, ("algorithm.surrogate", "cipso")),
        (
            {"algorithm.surrogate": "cispo", "algorithm.surrogate.dual": 3.0},
            ("algorithm.surrogate.dual", 3.0, "'cispo'"),
        ),
        ({"algorithm.surrogate": {"name": "gspo", "lo": 1}}, ("algorithm.surrogate.lo", 1, "low")),
        ({"algorithm.surrogate.high": {"name": "gspo"}}, ("algorithm.surrogate.high", {"name": "gspo"})),
        ({"algorithm.surrogate": ["gspo"]}, ("algorithm.surrogate", ["gspo"])),
        ({"algorithm.reward_terms": "length_reward"}, ("algorithm.reward_terms", "length_reward")),
        (
            {"algorithm.surrogate": "agro", "replay.unit": "rollout"},
            ("replay.unit", "rollout", "algorithm.surrogate='agro'"),
        ),
        ("seed=1", ("point", "seed=1")),
    ],
)
def test_a_point_that_cannot_be_is_named_with_its_setting(point, named):
    with refused(*named, str(point)[:20]):
        freeze_points({}, [{"seed": 0}, point])
    with raises_with(ConfigError, "no point"):
        freeze_points({}, [])


def test_a_sweep_lists_its_metrics_and_settings_once():
    sweep = Sweep(
        [{"seed": 1, "a": 2}, {"b": 3}],
        metrics=("m", "n"),
        x_axis="c",
        thresholds={"m": 0.5, "o": 1},
        pareto=(("c", "m"),),
    )
    assert sweep.named_metrics() == ("m", "n", "o", "c") and sweep.fields() == ("a", "b", "seed")
    assert Sweep([]).named_metrics() == ("eval/pass_rate",)
