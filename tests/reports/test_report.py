"""The report: one self-contained page for any run, in which text from the run stays plain text."""

import html
import json
import re

import pytest
from support.command_line import run_command
from support.page import Page
from support.refusal import raises_with

from jaxrl_llm.config import ConfigError, MetricsConfig, freeze, to_json
from jaxrl_llm.reports.charts import CHARTS
from jaxrl_llm.reports.html import print_samples, write_report
from jaxrl_llm.reports.metrics import METRICS, MetricsWriter
from jaxrl_llm.settings.use import use

EVIL = '<script>alert("x")</script> & more'


def make_run(workdir, iterations):
    writer = MetricsWriter(workdir, MetricsConfig(tensorboard=False))
    for i in range(1, iterations + 1):
        values = {name: 0.25 * i for name in METRICS if not name.startswith("eval/")}
        values["time/iteration_s"] = 61.0
        writer.write(i, values | {"update/clip_frac": float("nan")})
        row = {"iteration": i, "prompt_id": i, "group_id": 0, "prompt": EVIL, "completion": EVIL, "reward": None}
        row |= {"parts": {"a": None, "b": 1.0}, "stop_reason": "eos", "policy_version": i, "age": 0}
        writer.append({"samples.jsonl": [row] * 6})
    writer.close()


def make_evaluations(workdir):
    for name, pass_rate, answer in (("before", 0.27, "wrong answer"), ("after", 0.78, "right answer")):
        samples = [{"prompt": EVIL, "completion": answer, "reward": float(name == "after")}]
        text = json.dumps({"pass_rate": pass_rate, "num_samples": 1, "samples": samples})
        (workdir / f"eval_{name}.json").write_text(text)


def test_a_full_run_is_one_page_without_external_resources(tmp_path):
    make_run(tmp_path, 3)
    make_evaluations(tmp_path)
    config = freeze({"num_iterations": 3, "prompts": {"source": "jsonl", "name": "<questions>.jsonl"}})
    (tmp_path / "config.json").write_text(to_json(config))
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    text = path.read_text()
    page = Page(text)

    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith("#"), (name, value)
    assert not re.findall(r"(@import|url\((?!#))", text)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))  # clip paths of one chart do not cut another

    shown = [chart for chart in CHARTS if chart.title != "Clipped tokens"]  # all null: no chart
    assert page.tags.count("svg") == len(shown)
    for chart in shown:
        assert chart.title in page.text
    assert "<figcaption>Clipped tokens <" not in text
    for colour in ("#010101", "#020202", "#030303"):
        assert colour not in text
    for name, metric in METRICS.items():
        assert name in page.text and metric.meaning in page.text

    assert "27% → 78%" in page.text and "3 min 3 s" in page.text and "of 3 planned" in page.text
    assert page.text.index("wrong answer") < page.text.index("right answer")
    assert EVIL in page.text and "<questions>.jsonl" in page.text
    changed = page.text[page.text.index("changed") : page.text.index("settings at their default")]
    assert all(name in changed for name in ("num_iterations", "prompts.source", "prompts.name"))
    assert "prompts.shuffle" not in changed


def test_of_several_samples_each_questions_first_is_shown_and_nothing_of_an_end_that_the_run_has_gone_beyond(
    tmp_path, capsys
):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 3, "update/loss": 1.0}\n')
    for name in ("before", "after"):
        # Questions 0 and 1 have one prompt, and another word that is hidden.
        rows = [(f"question {max(1, i // 2)}", f"{name} {i // 2}.{i % 2}") for i in range(20)]
        samples = [{"prompt": prompt, "completion": text, "reward": 0.0} for prompt, text in rows]
        text = json.dumps({"pass_rate": 0.5, "num_samples": 2, "samples": samples})
        (tmp_path / f"eval_{name}.json").write_text(text)
    shown = lambda: re.findall(r"(before|after) (\d\.\d)", Page(write_report(tmp_path).read_text()).text)
    firsts = [(name, f"{i}.0") for i in range(8) for name in ("before", "after")]
    (tmp_path / "config.json").write_text(to_json(freeze({"num_iterations": 3})))
    assert shown() == firsts
    print_samples(tmp_path)
    assert re.findall(r"after (\d\.\d)", capsys.readouterr().out) == ["0.0", "1.0", "2.0"]
    # The run is extended, and was stopped.
    (tmp_path / "config.json").write_text(to_json(freeze({"num_iterations": 4})))
    assert shown() == [one for one in firsts if one[0] == "before"]
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)  # what metrics.jsonl has lost
    assert shown() == firsts


def test_settings_of_a_function_stand_beside_its_own_defaults(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def halved(x, *, weight: float = 0.5, power: int):\n    return weight * x.reward**power\n")
    make_run(tmp_path, 1)
    algorithm = {
        "surrogate": use("gspo", low=0.2),  # the default of another function's
        "aggregation": "sequence_mean",
        "reward_terms": ["length_reward", use(f"{own}:halved", power=1)],
        "divergence": use("reference", coefficient=0.1),
    }
    (tmp_path / "config.json").write_text(to_json(freeze({"algorithm": algorithm})))
    text = write_report(tmp_path).read_text()
    cells = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", text)]
    shown = {
        html.unescape(name): values for name, *values in filter(None, cells) if name.startswith("<code>algorithm.")
    }
    at = lambda name: [json.loads(html.unescape(value)) for value in shown[f"<code>{name}</code>"]]
    # What is changed has its default beside it.
    assert at("algorithm.surrogate") == ["gspo", "clipped"]
    assert at("algorithm.surrogate.low") == [0.2, 0.0003]
    assert at("algorithm.reward_terms") == [["length_reward", f"{own}:halved"], []]
    assert at("algorithm.divergence") == ["reference", "none"]
    assert at("algorithm.divergence.coefficient") == [0.1, 0.04]
    assert at(f"algorithm.reward_terms.{own}:halved.power")[0] == 1
    for name, value in {
        "algorithm.surrogate.high": 0.0004,
        "algorithm.surrogate.dual": 0.0,
        "algorithm.reward_terms.length_reward.weight": 0.1,
        f"algorithm.reward_terms.{own}:halved.weight": 0.5,
        "algorithm.divergence.estimator": "k3",
        "algorithm.advantage": "grpo",
    }.items():
        assert at(name) == [value]


def test_one_iteration_without_evaluation_config_or_samples_is_a_page(tmp_path):
    writer = MetricsWriter(tmp_path, MetricsConfig(tensorboard=False))
    writer.write(1, {"rollout/reward_mean": 0.5, "time/generate_s": 2.0})
    writer.close()
    page = Page(write_report(tmp_path).read_text())
    assert page.tags.count("svg") == 2 and "compute until then" not in page.text
    assert "Before and after" not in page.text and "0.50" in page.text


def test_iterations_that_metrics_have_lost_are_counted(tmp_path):
    """Between other iterations, and at the end if a checkpoint has more iterations."""
    writer = MetricsWriter(tmp_path, MetricsConfig(tensorboard=False))
    for i in (1, 2, 5):
        writer.write(i, {"rollout/reward_mean": 0.5})
    writer.close()
    assert "2 more are not in metrics.jsonl" in write_report(tmp_path).read_text()
    (tmp_path / "checkpoints" / "9").mkdir(parents=True)
    (tmp_path / "checkpoints" / "12.orbax-checkpoint-tmp").mkdir()
    assert "6 more are not in metrics.jsonl" in write_report(tmp_path).read_text()


def test_samples_are_printed_whatever_is_in_them(tmp_path, capsys):
    writer = MetricsWriter(tmp_path, MetricsConfig(tensorboard=False))
    rows = [{"iteration": 1, "prompt": f"{i}?", "completion": "a\u2028b\x85c", "reward": 1.0} for i in range(4)]
    writer.append({"samples.jsonl": rows})
    writer.close()
    print_samples(tmp_path)
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 4 and lines[0] == "  '1?' -> 'a\\u2028b\\x85c'  reward 1.0"


def test_every_curve_names_the_compute_spent_until_each_iteration_below_it(tmp_path):
    writer = MetricsWriter(tmp_path, MetricsConfig(tensorboard=False))
    for i, cost in ((1, 3.0), (2, 8.25), (3, 1250.0), (4, 2.5e6)):
        values = {"time/generate_s": 1.0, "time/update_s": 2.0 * i}
        writer.write(i, values | {"rollout/reward_mean": 0.5 * i, "time/compute_rollouts": cost})
    writer.close()
    pictures = re.findall("<svg.*?</svg>", write_report(tmp_path).read_text(), flags=re.DOTALL)
    assert len(pictures) == 2
    for svg in pictures:
        words = re.findall("<text[^>]*>([^<]*)</text>", svg)
        places = re.findall(r'translate\(([0-9.]+) ([0-9.]+)\)">([^<]*)</text>', svg)
        at = {word: (float(x), float(y)) for x, y, word in places}
        assert any("compute until then" in word for word in words)
        for iteration, cost in (("1", "3"), ("2", "8.25"), ("3", "1.25k"), ("4", "2.5M")):
            words.remove(iteration)
            words.remove(cost)
        # The places of a pair: one below the other.
        assert abs(at["4"][0] - at["2.5M"][0]) < 15 and at["2.5M"][1] > at["4"][1]
        assert abs(at["2"][0] - at["8.25"][0]) < 15 and at["8.25"][1] > at["2"][1]


def test_the_same_run_gives_the_same_page(tmp_path):
    make_run(tmp_path, 2)
    first = write_report(tmp_path).read_bytes()
    assert write_report(tmp_path).read_bytes() == first


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("metrics.jsonl", "", ["metrics.jsonl"]),
        ("metrics.jsonl", '{"iteration": 1\n', ["metrics.jsonl:1:", "JSON"]),
        ("metrics.jsonl", b"\xff\xfe\n", ["metrics.jsonl:1:", "JSON"]),
        ("samples.jsonl", bytes(9) + b"\n", ["samples.jsonl:1:", "JSON"]),
        ("config.json", "{", ["config.json", "JSON"]),
        ("config.json", b"", ["config.json", "JSON"]),
        ("config.json", b"{\x80", ["config.json", "JSON"]),
        ("config.json", '{"sed": 1}', ["config.json", "sed=1"]),
        ("eval_after.json", "[]", ["eval_after.json", "JSON", "[]"]),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, text, words):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "update/loss": 1.0}\n')
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with raises_with(ConfigError, *words):
        write_report(tmp_path)


def test_the_command_writes_the_page_or_exits_2_with_one_line(tmp_path, monkeypatch, capfd):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "update/loss": 1.0}\n')
    command = lambda workdir: run_command("report", f"--workdir={workdir}", monkeypatch=monkeypatch, capfd=capfd)
    done = command(tmp_path)
    assert (done.status, done.out) == (0, f"{tmp_path / 'report.html'}\n")
    for workdir in (tmp_path / "absent", ""):
        failed = command(workdir)
        assert failed.status == 2
        assert len(failed.err.splitlines()) == 1 and str(workdir) in failed.err
