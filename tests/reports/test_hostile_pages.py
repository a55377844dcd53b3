"""Everything that a run shows is plain text: data cannot control pages, tables, terminals or shells."""

import csv
import json
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from support.command_line import run_command
from support.page import Page
from support.parsing import config_of
from support.refusal import refused
from support.tiers import mostly_in
from test_report import make_run

from jaxrl_llm.actor.actor import too_many_failures
from jaxrl_llm.commands import sweep as sweep_module
from jaxrl_llm.config import ConfigError, freeze, recorded, to_json
from jaxrl_llm.reports import html as report
from jaxrl_llm.settings.schema import visible
from jaxrl_llm.sweeps.page import write_page
from jaxrl_llm.sweeps.points import Sweep, freeze_points, point_name
from jaxrl_llm.sweeps.table import Run, write_table
from jaxrl_llm.types import OUTCOME_ERROR, Rewards

ROOT = pathlib.Path(__file__).parents[2]

# Markup, an end of script, quotes, an entity; a turn of the direction, an escape code, a bell, half a character.
MARKUP = '</script></pre></td></title><script>alert(1)</script><img src=x onerror="a" \'>&lt;{{title}}{{body}}$\\frac{'
EVIL = MARKUP + "\u202eabc\x1b[31mred\x07\x9b\x00\ud83d"
SHOWN = MARKUP + "\\u202eabc\\x1b[31mred\\x07\\x9b\\x00\\ud83d"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
LONG = "x" * 1_000_000


def write_run(workdir, text):
    """Write the files of a run in which every text is ``text``."""
    workdir.mkdir(parents=True)
    make_run(workdir, 2)
    row = {"iteration": 1, "prompt_id": 1, "group_id": 0, "prompt": text, "completion": text, "reward": 1.0}
    row |= {"parts": {text: 1.0, "b": None}, "stop_reason": text, "policy_version": 1, "age": 0}
    messages = row | {"iteration": 2, "prompt": [{"role": text, "content": text}], "completion": LONG}
    (workdir / "samples.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(messages) + "\n")
    evaluation = {"pass_rate": 0.5, "num_samples": 1, "samples": [{"prompt": text, "completion": text, "reward": 1.0}]}
    for name in ("before", "after"):
        (workdir / f"eval_{name}.json").write_text(json.dumps(evaluation))
    printable = "".join(x for x in text if x.isprintable())
    settings = {
        "num_iterations": 2,
        "prompts": {"source": "jsonl", "name": printable, "system_prompt": re.sub("[\ud800-\udfff]", "", text)},
        "sampling": {"stop_strings": (printable, "\n")},
        "model": {"path": printable},
        # Functions of a run of elsewhere, whose file is not here.
        "algorithm": {
            "surrogate": {"name": f"{text}:f", "source": text},
            "reward_terms": [{"name": f"{text}:g", "weight": text, "source": text}],
        },
    }
    made_with = {"versions": {text: text}, "commit": text}
    config = json.loads(to_json(recorded(settings))) | {"made_with": made_with}
    (workdir / "config.json").write_text(json.dumps(config))


def test_no_element_or_attribute_of_a_report_comes_from_data(tmp_path):
    (tmp_path / "a").mkdir()
    names = {"plain": "plain", EVIL: "<b title='{{body}}'>&\u202e\x1b[31m"}
    pages = {}
    for text, name in names.items():
        write_run(tmp_path / name, text)
        pages[text] = report.write_report(tmp_path / name).read_text(encoding="utf-8")
    plain, evil = Page(pages["plain"]), Page(pages[EVIL])
    assert evil.tags == plain.tags and evil.attributes == plain.attributes
    assert not RAW.search(pages[EVIL].replace("\t", ""))
    # Question, answers before and after, two rollouts with their facts, and package, version and commit.
    assert evil.text.count(SHOWN) >= 9 and "<b title='{{body}}'>&\\u202e\\x1b[31m" in evil.text
    assert LONG in evil.text


def test_no_element_or_attribute_of_a_sweeps_page_comes_from_data(tmp_path):
    metric = "eval/pass_rate"

    def page_of(text, folder):
        rows = [{"iteration": i, metric: 0.1 * i, "tokens/trained": 10 * i} for i in (1, 2)]
        runs = [
            Run(f"{text}{i}", {"prompts.system_prompt": f"{text}{i}", "model.path": text, "seed": i}, "finished", rows)
            for i in range(2)
        ]
        sweep = Sweep([run.point for run in runs], facet="model.path", pareto=(("tokens/trained", metric),))
        (tmp_path / folder).mkdir()
        return write_page(tmp_path / folder / "sweep.html", runs, sweep, {metric: text}).read_text()

    plain, evil = page_of("plain", "a"), page_of(EVIL, "<script>&")
    before, after = Page(plain), Page(evil)
    # Where a picture writes a label its width moves the picture's edges; what is an element or a name of one does not.
    assert after.tags == before.tags and [name for name, _ in after.attributes] == [
        name for name, _ in before.attributes
    ]
    assert not any("alert" in (value or "") for _, value in after.attributes)
    assert SHOWN + "0" in after.text and "<script>&" in after.text and not RAW.search(evil)


def test_what_is_printed_moves_no_cursor(tmp_path, monkeypatch, capfd):
    sample = {"prompt": EVIL, "completion": EVIL, "reward": 1.0}
    evaluation = {"pass_rate": 1.0, "num_samples": 1, "samples": [sample]}
    (tmp_path / "eval_after.json").write_text(json.dumps(evaluation))
    report.print_samples(tmp_path)
    samples = capfd.readouterr().out
    assert "\\x1b[31m" in samples and not RAW.search(samples)
    missing = run_command("report", f"--workdir={tmp_path}/\x1b[31m\u202e", monkeypatch=monkeypatch, capfd=capfd)
    assert missing.status == 2 and "\\x1b[31m\\u202e" in missing.err and not RAW.search(missing.err)
    endless = run_command("report", f"--workdir={'y' * 100_000}", monkeypatch=monkeypatch, capfd=capfd)
    assert endless.status == 2 and len(endless.err) < 3000
    rewards = Rewards(np.zeros(1), {}, np.full(1, OUTCOME_ERROR), (f"task on {EVIL}",))
    assert not RAW.search(too_many_failures(freeze({}), rewards))
    (tmp_path / "log.txt").write_text(f"error: {EVIL.encode(errors='ignore').decode()}\n")
    assert not RAW.search(sweep_module.last_lines(tmp_path / "log.txt"))


def test_letters_of_every_script_stay_what_they_are():
    text = "é 日本 नमस्ते می‌خواهم 👩‍👩‍👧 a\u00a0b\tc\n\u200f"
    assert visible(text) == text


# ---- tables ------------------------------------------------------------------------------------------------------


def test_no_text_of_a_table_is_a_formula_and_numbers_stay_numbers(tmp_path):
    texts = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "fine", "a=1")
    rows = [{"iteration": 1, "eval/pass_rate": -0.5}]
    runs = [
        Run(text, {"prompts.system_prompt": text, "algorithm.advantage.delta_v": -0.25, "seed": i}, "finished", rows)
        for i, text in enumerate(texts)
    ]
    sweep = Sweep([run.point for run in runs], label=lambda point: point["prompts.system_prompt"])
    write_table(tmp_path / "table.csv", runs, sweep)
    with open(tmp_path / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    shown = [*("'" + text for text in texts[:7]), *texts[7:]]
    for column in ("point", "label", "prompts.system_prompt"):
        assert [line[column] for line in lines] == shown
    assert {line["algorithm.advantage.delta_v"] for line in lines} == {"-0.25"}
    assert {line["eval/pass_rate last"] for line in lines} == {"-0.5"}


# ---- names and commands --------------------------------------------------------------------------------------------

SHELL = "$(touch pwned) `touch pwned` ; touch pwned | & > < \\ ' \" * ? ~ ! # %s {x} é日本 ../../.. /etc"
VALUES = [
    SHELL,
    "..",
    ".",
    "/",
    "../../../../tmp/x",
    "-rf",
    "",
    " ",
    "a\nb",
    "x" * 5000,
    "日本" * 300,
    "\x1b[31m\u202e",
]


def test_folders_of_points_lie_in_the_sweeps_folder_are_legal_and_each_its_own(tmp_path):
    points = [{"prompts.system_prompt": value} for value in VALUES]
    points += [{"sampling.stop_strings": (value, "\t")} for value in VALUES]
    points += [{"seed": 1}, {"seed": 2}, {"optimizer.learning_rate": 1.0}, {"optimizer.learning_rate": 1}]
    names = [point_name(point) for point in points]
    assert len({name.lower() for name in names}) == len(points)
    for name in names:
        assert len(name.encode()) <= 255 and re.fullmatch(r"[A-Za-z][A-Za-z0-9._=+-]*", name)
        (tmp_path / name).mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for point in ({1: 2}, {None: 1}, {"": 1}, {".": 1}, {"a..b": 1}, {"prompts.arguments.../x": 1}, {"seed": {1}}):
        with pytest.raises(ConfigError):
            freeze_points({}, [point])


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Return stand-ins for programs.

    ``python`` writes its arguments to argv.jsonl. As in Slurm, ``sbatch`` passes its --wrap to a shell, and ``srun``
    runs its words without a shell.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    keep = "import json, sys; print(json.dumps(sys.argv[1:]), file=open(sys.argv[1] + '/argv.jsonl', 'a'))"
    for name, body in {
        "python": f'exec {shlex.quote(sys.executable)} -c {shlex.quote(keep)} {shlex.quote(str(tmp_path))} "$@"',
        "sbatch": 'for word; do case "$word" in --wrap=*) exec sh -c "${word#--wrap=}";; esac; done',
        "srun": '[ -z "$JAXRL_DISTRIBUTED" ] && exec "$@"',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.chdir(tmp_path)

    def given():
        path = tmp_path / "argv.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        return [line[1:] for line in lines]

    return given


(OF_SEVERAL,) = re.findall("--launch='(.*srun.*)'`", (ROOT / "docs/how-to/stop_and_resume.md").read_text())


@pytest.mark.parametrize(
    "template",
    mostly_in("slow", ["print", "sbatch --job-name={name} --wrap={command}", "sh -c {command}", OF_SEVERAL]),
)
def test_a_shell_runs_exactly_the_command_of_each_point(template, stand_ins, tmp_path, monkeypatch, capfd):
    file = tmp_path / "it's a $sweep; file.py"
    file.write_text(
        "from jaxrl_llm.config import defaults\ndef get_config():\n    config = defaults()\n"
        "    config.prompts.arguments = {'text': 'a', 'number': 1}\n    return config\n"
    )
    base = {"prompts": {"arguments": {"text": "a", "number": 1}}}
    points = [{"prompts.system_prompt": value} for value in VALUES]
    points += [{"prompts.arguments.text": SHELL}, {"sampling.stop_strings": (SHELL, "\n")}, {"rewards.weights": (0.5,)}]
    points += [{"prompts.arguments.number": -5, "optimizer.learning_rate": 1e-7}]
    frozen = freeze_points(base, points)
    monkeypatch.setenv("JAXRL_DISTRIBUTED", "0")
    folder = tmp_path / "my runs; $(touch pwned)"
    commands = {
        name: sweep_module.train_command(str(file), freeze(base), config, folder / name)
        for name, (_, config) in frozen.items()
    }
    assert sweep_module.launch_commands(template, commands, folder) == 0
    if template == "print":
        subprocess.run(["sh", "-c", capfd.readouterr().out], check=True)
    ran = stand_ins()
    assert len(ran) == len(frozen)
    for words, (name, (_, config)) in zip(ran, frozen.items(), strict=True):
        assert words[:4] == ["-m", "jaxrl_llm.train", f"--config={file}", f"--workdir={folder / name}"]
        assert config_of(*words[2:], monkeypatch=monkeypatch) == config
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("text", 1), ("number", 1.5), ("text", [1])],
)
def test_what_a_command_line_cannot_express_is_refused_and_not_changed(field, value, tmp_path):
    base = freeze({"prompts": {"arguments": {"text": "a", "number": 1}}})
    config = freeze({"prompts": {"arguments": {"text": "a", "number": 1} | {field: value}}})
    with refused(f"prompts.arguments.{field}", value):
        sweep_module.train_command("f.py", base, config, tmp_path)


@pytest.mark.parametrize("template", ["{command.x}", "{0}", "{", "{command[x]}"])
def test_a_template_that_names_something_else_is_one_line(template, tmp_path):
    with refused("--launch", template, "{command}"):
        sweep_module.launch_commands(template, {"a": "true"}, tmp_path)
