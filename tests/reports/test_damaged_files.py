"""A report of damaged files is written, or refused in one line with the file's name, but never ends in a traceback."""

import copy
import json

import pytest
from support.tiers import mostly_in
from test_report import make_evaluations, make_run

from jaxrl_llm.config import ConfigError, freeze, to_json
from jaxrl_llm.reports import page
from jaxrl_llm.reports.html import write_report
from jaxrl_llm.runtime.checkpoint_files import step_of

DEEP = "[" * 100_000 + "]" * 100_000
# What takes the place of a value. The last ones are no values of Python, so they are put into the text.
OTHERS = [None, True, -1, 0, 2.5, 1e308, "", "x", [], [1], {}, {"a": 1}, [{"role": 1}], "²", 10**30]
RAW = {"not a number": "NaN", "infinite": "1e999", "many digits": "9" * 5000, "deep": DEEP, "cut": '{"a": '}
MARK = "replace me"


@pytest.fixture(autouse=True)
def few_pictures(request, monkeypatch):
    """Draw the charts only where metrics are damaged: they take most of the time."""
    if "extreme" not in request.node.name:
        monkeypatch.setattr(page, "picture", lambda draw, **options: "<svg></svg>")


def write_files(workdir):
    workdir.mkdir()
    make_run(workdir, 2)
    make_evaluations(workdir)
    (workdir / "config.json").write_text(to_json(freeze({"num_iterations": 2})))
    settings = json.loads((workdir / "config.json").read_text())
    settings["made_with"] = {"versions": {"jax": "0.10.2"}, "commit": "abc", "devices": "1 x cpu"}
    (workdir / "config.json").write_text(json.dumps(settings))
    return workdir


def fields_of(row):
    """Return the paths of the fields of a row, inner ones of objects and of the first of a list too."""
    paths = []
    for name, value in row.items():
        paths.append((name,))
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict):
            step = (name, 0) if isinstance(value, list) else (name,)
            paths.extend(step + path for path in fields_of(inner))
    return paths


def changed(row, path, value):
    row = copy.deepcopy(row)
    inner = row
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return row


FIELDS = {
    "metrics.jsonl": [("iteration",), ("rollout/reward_mean",), ("time/iteration_s",), ("time/compute_rollouts",)],
    "samples.jsonl": [(x,) for x in ("iteration", "prompt", "completion", "reward", "parts", "stop_reason", "age")],
    "eval_after.json": [("pass_rate",), ("num_samples",), ("samples",), ("samples", 0), ("samples", 0, "prompt")],
    "eval_before.json": [("samples", 0, "completion"), ("samples", 0, "reward")],
    "config.json": [("made_with",), ("made_with", "versions"), ("made_with", "commit"), ("num_iterations",)],
}
FIELDS["config.json"] += [("prompts",), ("algorithm",), ("algorithm", "surrogate")]


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in FIELDS.items() for path in paths])
def test_a_value_of_another_type_is_shown_or_refused_by_the_name_of_its_file(name, path, tmp_path):
    file = write_files(tmp_path / "run") / name
    lines = file.read_text().splitlines() if name.endswith("l") else [file.read_text()]
    row = json.loads(lines[-1])
    texts = [json.dumps(changed(row, path, value)) for value in OTHERS]
    texts += [json.dumps(changed(row, path, MARK)).replace(json.dumps(MARK), raw) for raw in RAW.values()]
    num_refused = 0
    for text in texts:
        file.write_text("\n".join([*lines[:-1], text]) + "\n")
        try:
            path = write_report(tmp_path / "run")
            assert path.stat().st_size > 10_000
        except ConfigError as error:
            assert str(file) in str(error)
            num_refused += 1
    assert num_refused >= 3  # what is deep or cut is refused in any field


@pytest.mark.parametrize("value", mostly_in("slow", [1e300, None, 0, -1, -1e300, 10**12], plain=2))
@pytest.mark.parametrize("field", mostly_in("slow", ["rollout/reward_mean", "iteration"]))
def test_extreme_metrics_are_drawn_or_refused(field, value, tmp_path):
    file = write_files(tmp_path / "run") / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text(lines[0] + "\n" + json.dumps(json.loads(lines[1]) | {field: value}) + "\n")
    try:
        write_report(tmp_path / "run")
    except ConfigError as error:
        assert str(file) in str(error)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("content", ["", "\n", "null\n", "[]\n", DEEP + "\n", "{\n", "{}\n", "\x00\xff\n", "7\n"])
def test_a_file_of_other_content_is_shown_or_refused_by_its_name(name, content, tmp_path):
    file = write_files(tmp_path / "run") / name
    file.write_bytes(content.encode("latin-1"))
    try:
        write_report(tmp_path / "run")
    except ConfigError as error:
        assert str(file) in str(error)


@pytest.mark.parametrize("name", FIELDS)
def test_a_file_without_one_of_its_fields_is_shown_or_refused_by_its_name(name, tmp_path):
    file = write_files(tmp_path / "run") / name
    line = file.read_text().splitlines()[-1] if name.endswith("l") else file.read_text()
    row = json.loads(line)
    for field in list(row)[:12]:
        file.write_text(json.dumps({key: value for key, value in row.items() if key != field}) + "\n")
        try:
            write_report(tmp_path / "run")
        except ConfigError as error:
            assert str(file) in str(error)


def test_a_folder_of_another_name_beside_the_checkpoints_is_no_checkpoint(tmp_path):
    workdir = write_files(tmp_path / "run")
    for name in ("²", "٣", "1²", "-1", "best", "2.tmp", "9" * 200):
        (workdir / "checkpoints" / name).mkdir(parents=True)
    assert "more are not in metrics.jsonl" not in write_report(workdir).read_text()
    assert [step_of(name) for name in ("0", "12", "²", "٣", "", "1²", "-1", "best")] == [0, 12, *[None] * 6]
