"""generate, score and evaluate: rows in order, log-probs that agree, estimators by hand."""

import dataclasses
import errno
import json
import math
import os

import jax
import numpy as np
import pytest
from support.building import ONE, mesh_of, settings_of
from support.command_line import DEBUG_CONFIG
from support.refusal import ANY, raises_with, refused, refused_row
from support.runs import save_run

from jaxrl_llm.actor import evaluation
from jaxrl_llm.commands import evaluate, generate, score
from jaxrl_llm.config import ConfigError, SamplingConfig, freeze
from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.models.files import hf, pretrained
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import row_files, sharding

PROMPTS = [
    {"prompt": "a long question that needs a wider bucket of tokens", "tag": 1},
    {"messages": [{"role": "user", "content": "hi"}]},
    {"prompt_ids": [72, 101, 108], "tag": 3},
    {"prompt": "four"},
]


@pytest.fixture(scope="module")
def source():
    return pretrained.resolve("random:debug")


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    mesh = mesh_of(ONE)
    monkeypatch.setattr(sharding, "make_mesh", lambda *_: mesh)


def run(source, folder, prompts, **settings):
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    fixed = dict(ignore_eos=False, batch_size=8, seed=0, compute_dtype="float32")
    sampling = SamplingConfig(max_completion_tokens=6, **settings.pop("sampling", {}))
    return generate.generate(source, str(folder / "prompts.jsonl"), sampling=sampling, **fixed | settings)


def test_score_gives_the_log_probs_that_generate_sampled_with(source, tmp_path):
    made = run(source, tmp_path, PROMPTS)
    assert [row.get("tag") for row in made] == [1, None, 3, None]
    assert made[2]["prompt_ids"] == [72, 101, 108]
    assert made[1]["prompt_ids"] == list(b"hi")
    for row in made:
        assert row["completion"] == source.tokenizer().decode(row["completion_ids"])
        assert len(row["logp"]) == len(row["completion_ids"]) <= 6
    row_files.write(str(tmp_path / "made.jsonl"), made)
    scored = score.score(source, str(tmp_path / "made.jsonl"), batch_size=3, compute_dtype="float32")
    for row, again in zip(made, scored, strict=True):
        assert again["tag" if "tag" in row else "prompt_ids"] == row["tag" if "tag" in row else "prompt_ids"]
        # Measured: 5e-7 nats.
        assert again["logp"] == pytest.approx(row["logp"], abs=1e-5)


def test_a_stop_token_ends_also_where_the_models_own_ends_are_ignored(source, tmp_path):
    [whole] = run(source, tmp_path, PROMPTS[:1], ignore_eos=True)
    drawn = whole["completion_ids"]
    stop = next(i for i in drawn if 32 < i < 127)  # a byte that is a character
    [cut] = run(source, tmp_path, PROMPTS[:1], ignore_eos=True, sampling={"stop_tokens": (chr(stop),)})
    assert cut["completion_ids"] == drawn[: drawn.index(stop) + 1] and len(drawn) == 6 and drawn[-1] != stop


def test_greedy_takes_the_likeliest_token_whatever_the_seed(source, tmp_path):
    one, other = (
        run(source, tmp_path, PROMPTS[2:], sampling={"temperature": 0.0}, ignore_eos=True, seed=seed) for seed in (0, 5)
    )
    # The seed also draws the random weights of this preset: compare within a seed, by scoring every alternative.
    assert all(len(row["completion_ids"]) == 6 for row in one + other)
    row = one[0]
    first, best = row["completion_ids"][0], row["logp"][0]
    rivals = [{"prompt_ids": row["prompt_ids"], "completion_ids": [i]} for i in range(0, 260, 13) if i != first]
    row_files.write(str(tmp_path / "rivals.jsonl"), rivals)
    scored = score.score(source, str(tmp_path / "rivals.jsonl"), batch_size=32, compute_dtype="float32")
    assert all(rival["logp"][0] <= best for rival in scored)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"prompt": "x"}\n{"prompt": \n', 2, ["JSON"]),
        ("[1]\n", 1, ["object"]),
        ('{"prompt": ""}\n', 1, ["`prompt_ids`", "`prompt`"]),
        ('{"prompt_ids": [1, 999]}\n', 1, ["`prompt_ids`", "999", "0..259"]),
        ('{"prompt_ids": []}\n', 1, ["`prompt_ids`"]),
        ('{"messages": [{"role": "user", "content": ""}]}\n', 1, ["`prompt_ids`"]),
        ('{"prompt": "' + "x" * 3000 + '"}\n', 1, ["2048"]),
    ],
)
def test_bad_rows_are_named_with_file_and_line(source, tmp_path, text, line, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with refused_row(path, line, *words):
        generate.generate(source, str(path), sampling=SamplingConfig(), ignore_eos=False, batch_size=8, seed=0,
                          compute_dtype="float32")  # fmt: skip


def test_a_file_without_rows_is_named(source, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n")
    with raises_with(ConfigError, str(path)):
        generate.generate(source, str(path), sampling=SamplingConfig(), ignore_eos=False, batch_size=8, seed=0,
                          compute_dtype="float32")  # fmt: skip


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no/such/out.jsonl", ["='no/such/out.jsonl'"]),
        (".", ["='.'"]),
        ("/proc/out.jsonl", ["='/proc/out.jsonl'"]),
        ("x" * 300, [os.strerror(errno.ENAMETOOLONG)]),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    with refused("--output", ANY, *words):
        row_files.check_output(path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "there").write_text("kept\n")
    row_files.check_output("there")
    row_files.check_output("new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("there", "kept\n")]


@pytest.mark.tier("slow")  # plain: test_generator.test_samples_do_not_depend_on_slots_...
@pytest.mark.parametrize("slots", [3, 64])
def test_how_many_are_decoded_side_by_side_changes_no_evaluation(slots):
    """Fewer slots than a question has answers, more slots than answers, and as many as training's 32."""

    def evaluated(slots):
        settings = {"eval.num_prompts": 5, "eval.num_samples": 4, "eval.slots": slots}
        settings["sampling.max_completion_tokens"] = 6
        return evaluate.evaluate(freeze(settings_of(DEBUG_CONFIG, settings)), "random:debug", "", None)

    one = evaluated(0)
    assert len(one["samples"]) == 20 and len({sample["completion"] for sample in one["samples"]}) > 10
    assert evaluated(slots) == one


def test_rows_that_an_evaluation_skips_are_told_and_counted(tmp_path, capsys):
    rows = [{"prompt": f"{i}?", "answer": "a"} if i % 3 else {"no": i} for i in range(36)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"prompts.source": "jsonl", "prompts.name": str(tmp_path / "rows.jsonl"), "prompts.bad_row": "skip"}
    settings |= {"eval.num_prompts": 2, "sampling.max_completion_tokens": 2, "rewards.functions": ("math",)}
    result = evaluate.evaluate(freeze(settings_of(DEBUG_CONFIG, settings)), "random:debug", "", 1)
    assert (result["num_prompts"], result["skipped_count"]) == (2, 12)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 11 and said[1].startswith(f"skipped {tmp_path}/rows.jsonl:4: ")
    assert said[-1] == "skipped ... and 2 more"


def test_questions_that_a_checkpoint_was_trained_on_are_warned_of(monkeypatch, capsys):
    """Without the warning, the score would look like a score on questions that were held out."""
    fixed = {"eval.num_prompts": 5, "sampling.max_completion_tokens": 6, "seed": 1}
    config = lambda changed: freeze(settings_of(DEBUG_CONFIG, fixed | changed))

    class Begun(Exception):
        pass

    def begin(*_):
        raise Begun

    def warned(saved, given=None):
        def restored(directory, params, check):
            return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), params), config(saved)

        monkeypatch.setattr(evaluate, "restore_params", restored)
        monkeypatch.setattr(evaluate, "check_room", begin)  # nothing is compiled
        with pytest.raises(Begun):
            evaluate.evaluate(config(given or {}), "", "runs/mine", 1)
        return capsys.readouterr().err

    assert warned({}) == ""
    assert warned({"eval.num_prompts": 8}) == ""  # five of the eight
    said = warned({"seed": 0, "prompts.size": 64}, {"prompts.size": 60})
    assert said.startswith("warning: runs/mine ")
    assert "seed 0 -> 1" in said
    assert "prompts.size 64 -> 60" in said
    assert "eval.num_prompts 3 -> 5" in warned({"eval.num_prompts": 3})


@pytest.mark.tier("slow")  # plain: test_a_checkpoint_is_evaluated_without_the_weights_...
def test_a_run_s_folder_is_evaluated_as_a_model_like_its_checkpoint(tmp_path, capsys):
    config = lambda **changed: freeze(
        settings_of(DEBUG_CONFIG, {"eval.num_prompts": 5, "sampling.max_completion_tokens": 6} | changed)
    )
    run, settings = str(tmp_path / "run"), {k: dataclasses.asdict(getattr(config(), k)) for k in ("prompts", "eval")}
    random = np.random.default_rng(3)
    draw = lambda x: random.normal(scale=0.3, size=x.shape).astype(np.float32)
    shapes = Model(PRESETS["debug"]).abstract_params(mesh_of(ONE))
    save_run(tmp_path / "run", "random:debug", jax.tree.map(draw, shapes), **settings)
    results = [evaluate.evaluate(config(seed=1), *which, 2) for which in ((run, ""), ("", run), ("random:debug", ""))]
    assert results[0] == results[1] != results[2]
    said = capsys.readouterr().err
    assert said.count(f"warning: {run} ") == 2
    assert said.count("(seed 0 -> 1") == 2


def test_a_checkpoint_is_evaluated_without_the_weights_that_it_was_trained_from(tmp_path):
    model = Model(PRESETS["debug"])
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), model.abstract_params(mesh_of(ONE)))
    hf.export(zeros, model, make_byte_tokenizer(), tmp_path / "model")
    run = save_run(tmp_path / "run", str(tmp_path / "model"), zeros)
    (tmp_path / "model/model.safetensors").unlink()
    fixed = {"model.path": str(tmp_path / "model"), "eval.num_prompts": 2, "sampling.max_completion_tokens": 4}
    config = freeze(settings_of(DEBUG_CONFIG, fixed))
    assert evaluate.evaluate(config, "", str(run), 1)["num_samples"] == 1
    with raises_with(ConfigError, "safetensors"):
        evaluate.evaluate(config, str(tmp_path / "model"), "", 1)


def test_other_sources_and_files_hold_out_what_no_run_was_trained_on():
    rewards = {"functions": ("x:y",)}
    files = lambda **own: freeze({"prompts": {"source": "jsonl", "name": "a"}, "rewards": rewards} | own)
    of_b = {"num_prompts": 3, "name": "b"}
    assert evaluate.trained_on(files(), files(eval=of_b, seed=1)) == {}
    assert evaluate.trained_on(files(), freeze({"prompts": {"source": "arithmetic"}, "seed": 1})) == {}
    assert evaluate.trained_on(files(eval=of_b), files(eval={"num_prompts": 3})) == {"eval.name": ("b", "")}


def test_pass_at_k_counts_draws_without_replacement():
    assert evaluation.pass_at_k(4, 1, 1) == 0.25
    assert evaluation.pass_at_k(4, 1, 2) == 0.5  # 3 of the 6 pairs hold the one that passes
    assert evaluation.pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert evaluation.pass_at_k(5, 0, 3) == 0.0
    assert evaluation.pass_at_k(5, 3, 3) == 1.0  # of 5 with 2 failures any 3 hold a pass
    assert math.isclose(evaluation.pass_at_k(10, 3, 4), 1 - (7 * 6 * 5 * 4) / (10 * 9 * 8 * 7))


def test_majority_is_of_answers_not_of_texts():
    assert evaluation.majority_passes(["it is 7", "7", "8"], [True, True, False])
    assert not evaluation.majority_passes(["8", "it is 8.", "7"], [False, False, True])
    assert evaluation.majority_passes(["yes", "no"], [True, False])  # a tie goes to the earlier answer
    both = [r"\boxed{\frac{3}{2}}"] * 3 + [r"\boxed{\frac{1}{2}}"]
    assert not evaluation.majority_passes(both, [False] * 3 + [True])  # both end in 2
    assert evaluation.majority_passes(both, [True] * 3 + [False])
    assert not evaluation.majority_passes(["7", "so 7"], [False, True])  # the same vote, of which the first is taken
    programs = ["def f():\n    return 1 + 1", "def f(x):\n    return x * 1", "f = lambda x: 3"]
    assert not evaluation.majority_passes(programs, [False, True, True], are_programs=True)
    assert evaluation.majority_passes([*programs, programs[2]], [False, False, True, True], are_programs=True)
    assert not evaluation.majority_passes(["so 1,200", r"\boxed{1\,200}", "-3.5"], [False, False, True])
    assert evaluation.majority_passes(["\u201cYes\u201d.", "no", "yes"], [True, False, True])
