"""Written JSON is valid for every JSON reader, and read JSON is checked strictly."""

import ast
import json
import math
import pathlib

import numpy as np
import pytest
from support.refusal import refused

import jaxrl_llm
from jaxrl_llm.commands import replay_plan
from jaxrl_llm.config import MetricsConfig
from jaxrl_llm.reports.html import write_report
from jaxrl_llm.reports.metrics import METRICS, MetricsWriter, read_metrics
from jaxrl_llm.runtime import json_lines, row_files
from jaxrl_llm.sweeps.points import Sweep
from jaxrl_llm.sweeps.table import Run, write_table

PACKAGE = pathlib.Path(jaxrl_llm.__file__).parent
NAN, INF = math.nan, math.inf

# Modules that call json.dumps themselves, and why no other program reads a NaN of theirs.
OWN = {
    "runtime/json_lines.py": "the writer",
    "config.py": "settings, whose numbers are finite; stands below the writer",
    "runtime/checkpoint.py": "a copy of the state, read by this package alone",
    "runtime/checkpoint_files.py": "a digest",
    "scoring/reward_worker.py": "lines for the run's own process, which refuses bad rows",
    "conversations/environment_worker.py": "state (refuses NaN) and attributes, for the run's own processes",
    "actor/evaluation.py": "what duplicates are found by",
    "runtime/run_record.py": "settings, whose numbers are finite",
    "scoring/code_tests.py": "a request to the package's own sandbox",
    "examples/dream.py": "text of a prompt",
    "models/files/hf.py": "the header of a safetensors file: names, shapes and offsets",
    "models/files/templates.py": "a date as a literal of Jinja",
    "questions/stream.py": "digests and keys",
    "questions/tasks/reasoning_gym_task.py": "a key of a cache",
    "reports/html.py": "settings, whose numbers are finite, as text of a page",
    "sweeps/points.py": "a digest",
}


def parsed(text):
    return json.loads(text, parse_constant=pytest.fail)


def test_numbers_that_json_does_not_have_are_null():
    value = {"a": [NAN, (1.5, -INF)], "b": {"c": INF, "d": np.float64("nan")}, "e": "NaN", "f": -0.0}
    expected = {"a": [None, [1.5, None]], "b": {"c": None, "d": None}, "e": "NaN", "f": -0.0}
    assert parsed(json_lines.written(value)) == parsed(json_lines.written(value, indent=1)) == expected
    assert math.isnan(value["a"][0])  # the value itself is not changed
    with pytest.raises(TypeError):
        json_lines.written({"a": object()})


def test_half_a_surrogate_pair_is_written_as_an_escape():
    for how in ({}, {"ensure_ascii": False}):
        text = json_lines.written({"a": "é\ud83d 天"}, **how)
        assert parsed(text.encode().decode()) == {"a": "é\ud83d 天"}


@pytest.mark.parametrize(
    "text",
    ["NaN", "[Infinity]", '{"a": -Infinity}', "1e999", "-1e999", '{"a": 1, "a": 1}', '{"a": {"b": 1, "b": 2}}', ""],
)
def test_what_readers_of_json_read_differently_is_refused(text):
    with pytest.raises(ValueError):
        json_lines.strict(text)


def test_json_is_read():
    value = {"a": [1, -0.5, 1e300, None, True, "NaN"], "b": {}, "c": 2**70}
    assert json_lines.strict(json.dumps(value)) == json_lines.strict(json.dumps(value).encode()) == value


def test_whatever_leaves_the_process_is_written_by_one_function():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "sandbox":
            continue  # the package's own processes talk to each other
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.dumps", "json.dump"):
                found.add(str(path.relative_to(PACKAGE)))
    assert found <= OWN.keys(), f"{sorted(found - OWN.keys())}: write with json_lines.written, or say in OWN why not"


def test_rows_of_generate_and_score_are_json(tmp_path):
    row_files.write(str(tmp_path / "rows.jsonl"), [{"logp": [-0.5, -INF], "completion": "a"}])
    assert parsed((tmp_path / "rows.jsonl").read_text()) == {"logp": [-0.5, None], "completion": "a"}


def test_readers_of_a_run_take_metrics_that_are_all_null(tmp_path):
    writer = MetricsWriter(tmp_path, MetricsConfig(tensorboard=True))
    for iteration in (1, 2):
        writer.write(iteration, dict.fromkeys(METRICS, NAN))
        row = {"iteration": iteration, "prompt_id": 1, "group_id": 0, "prompt": "a", "completion": "b", "reward": NAN}
        row |= {"parts": {"task": NAN}, "stop_reason": "eos", "policy_version": 1, "age": NAN}
        writer.append({"samples.jsonl": [row]})
    writer.close()
    evaluation = {"pass_rate": NAN, "num_samples": 1, "samples": [{"prompt": "a", "completion": "b", "reward": NAN}]}
    for name in ("before", "after"):
        (tmp_path / f"eval_{name}.json").write_text(json_lines.written(evaluation))
    rows = read_metrics(tmp_path)
    assert [row["iteration"] for row in rows] == [1, 2]
    assert {value for row in rows for name, value in row.items() if name != "iteration"} == {None}
    assert write_report(tmp_path).is_file()
    metric = "eval/pass_rate"
    sweep = Sweep(
        [{"seed": 0}], x_axis="tokens/trained", thresholds={metric: 0.4}, pareto=(("tokens/trained", metric),)
    )
    write_table(tmp_path / "table.csv", [Run("a", {"seed": 0}, "finished", rows)], sweep)
    assert "finished" in (tmp_path / "table.csv").read_text()
    with refused(f"--workdir={tmp_path}"):
        replay_plan.measured_mu(str(tmp_path))
