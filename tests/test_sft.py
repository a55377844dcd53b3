"""Supervised fine-tuning: rows and loss by hand, and a folder with the trained model."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.building import ONE, TINY, learner_params, mesh_of
from support.command_line import run_command
from support.refusal import ANY, check_refusal, check_row, refused, refused_row

from jaxrl_llm.commands.sft import Supervised, answer_rows, answer_tokens, sft
from jaxrl_llm.config import OptimizerConfig, freeze
from jaxrl_llm.learner import optim
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.programs import compile_all
from jaxrl_llm.types import Example, PromptBatch

END = 257  # of the byte tokenizer


def batch(*pairs, width=6):
    """Return questions and answers as a batch whose prompts are padded to ``width``."""
    tokens = np.zeros((len(pairs), width), np.int32)
    for row, (question, _) in enumerate(pairs):
        tokens[row, : len(question)] = list(question.encode())
    length = np.array([len(question) for question, _ in pairs], np.int32)
    examples = tuple(Example(question, {"answer": answer}) for question, answer in pairs)
    return PromptBatch(tokens, length, np.arange(len(pairs), dtype=np.int32), examples)


def test_a_row_is_question_answer_and_end():
    tokens, prompt_length, length = answer_rows(batch(("1+2=", "3"), ("7+8=", "15")), make_byte_tokenizer(), 4)
    assert tokens.tolist() == [
        [*b"1+2=3", END, 0, 0, 0, 0],
        [*b"7+8=15", END, 0, 0, 0],
    ]
    assert prompt_length.tolist() == [4, 4] and length.tolist() == [6, 7]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, ["answer=None"]),
        ({"answer": 3}, ["answer=3"]),
        ({"answer": "abcd"}, ["5 tokens", "sampling.max_completion_tokens=4"]),
    ],
)
def test_an_answer_that_cannot_be_learned_is_named(columns, words):
    with refused_row("file", 3, *words):
        answer_tokens(Example("?", columns, "file:3"), make_byte_tokenizer(), 4)


def test_the_loss_is_the_cross_entropy_of_answer_and_end_alone():
    model = Model(TINY, remat="none")
    params = learner_params(model, mesh_of(ONE))
    rows = answer_rows(batch(("1+2=", "3"), ("70+8=", "78")), make_byte_tokenizer(), 4)
    task = Supervised(model, optax.sgd(lambda _: 0.1), width=4, chunk=2)

    # Oracle: the whole softmax in float64 at every position, from the model's hidden states.
    tokens, prompt_length, length = rows
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    hidden, _ = jax.jit(model.forward)(params, tokens, positions)
    logits = np.asarray(hidden, np.float64) @ np.asarray(model.head(params), np.float64).T
    logp = [[], []]
    for row in range(2):
        for at in range(prompt_length[row], length[row]):
            z = logits[row, at - 1]
            logp[row].append(z[tokens[row, at]] - z.max() - np.log(np.exp(z - z.max()).sum()))
    assert [len(some) for some in logp] == [2, 3]
    expected = -sum(map(sum, logp)) / 5
    np.testing.assert_allclose(jax.jit(task.answer_logp)(params, rows), [sum(some) for some in logp], rtol=1e-5)

    state = task.optimizer.init(params)
    step = jax.jit(task.step)
    params, state, loss = step(params, state, rows)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert step(params, state, rows)[2] < loss


class Falling(Supervised):
    """A model whose loss has gradient 1 in every weight."""

    def loss(self, params, rows, base=None):
        return jnp.sum(params["w"].astype(jnp.float32))


def test_weights_in_bfloat16_move_as_far_as_they_would_where_the_optimizer_forgets_in_every_step():
    config = OptimizerConfig(learning_rate=1e-4, max_grad_norm=0.0, reset_every_steps=1)
    task = Falling(None, optim.make(config, 300), width=4, chunk=1)
    params = {"w": jnp.full(4096, 0.75, jnp.bfloat16)}
    state, step = task.optimizer.init(params), jax.jit(task.step)
    for _ in range(300):
        params, state, _ = step(params, state, None)
    # 300 steps of 1e-4, each a step of 2^-8 with a chance of 0.0256: a deviation of 0.0107, and 1.7e-4 of the mean.
    moved = np.asarray(params["w"], np.float64) - 0.75
    assert abs(moved.mean() + 0.03) < 1e-3 and 0.008 < moved.std() < 0.014


def settings(folder, **more):
    lines = [json.dumps({"prompt": f"Question {i:02d}:", "answer": "yes"}) for i in range(40)]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "num_iterations": 60,
        "model": {"remat": "auto"},
        "prompts": {"source": "jsonl", "name": str(folder / "questions.jsonl"), "chat_template": False},
        "sampling": {"max_completion_tokens": 4},
        "update": {"batch_size": 16, "micro_batch_size": 16},
        "optimizer": {"learning_rate": 1e-2},
        "eval": {"num_prompts": 10, "every_iterations": 20},
    } | more


def test_what_is_learned_is_in_the_folder(tmp_path, monkeypatch, capfd):
    one = mesh_of(ONE)
    monkeypatch.setattr(sharding, "make_mesh", lambda _: one)
    config = freeze(settings(tmp_path))
    reached = sft(config, tmp_path / "model", until=0.5)
    assert reached >= 0.5  # by chance 260^-4
    steps = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step")]
    assert 1 <= len(steps) <= 3 and f"{reached:.3f}" in steps[-1]

    source = pretrained.resolve(str(tmp_path / "model"))
    tokenizer, mesh = source.tokenizer(), mesh_of(ONE)
    assert tokenizer.eos_ids == (END,) and tokenizer.encode("yes") == list(b"yes")
    model = Model(source.architecture())
    params = source.load_params(model, mesh, seed=0)
    question = np.array([list(b"Question 99:")], np.int32)
    hidden, _ = jax.jit(model.forward)(params, question, np.arange(question.shape[1], dtype=np.int32)[None])
    assert jax.nn.softmax(hidden[0, -1] @ model.head(params).T)[ord("y")] > 0.5


def test_who_waits_is_told_how_far_it_is_where_no_evaluation_is_asked_for(tmp_path, monkeypatch, capfd):
    one = mesh_of(ONE)
    monkeypatch.setattr(sharding, "make_mesh", lambda _: one)
    given = settings(tmp_path, num_iterations=40, eval={"num_prompts": 10})
    reached = sft(freeze(given), tmp_path / "model", until=1e-9)  # by chance 260^-4
    steps = [line.split(" | ")[0] for line in capfd.readouterr().out.splitlines() if line.startswith("step")]
    assert reached >= 1e-9 and steps == [f"step {n}" for n in range(2, 2 * len(steps) + 1, 2)] and len(steps) < 20


def learned_once(folder, monkeypatch, *, name, rows, **settings_of):
    """Train one step on 40 questions, with the file ``name`` of held-out ``rows``."""
    one = mesh_of(ONE)
    monkeypatch.setattr(sharding, "make_mesh", lambda _: one)
    (folder / name).write_text("".join(json.dumps({"prompt": f"{i}?", **row}) + "\n" for i, row in enumerate(rows)))
    given = settings(folder, num_iterations=1, eval={"num_prompts": len(rows), "name": str(folder / name)})
    given["prompts"] |= settings_of
    return sft(freeze(given), folder / "model")


def test_held_out_answers_have_their_nats_per_token_beside_their_probability(tmp_path, monkeypatch, capfd):
    """The probability of a long answer is 0.000 from the first to the last step."""
    monkeypatch.setattr(Supervised, "answer_logp", lambda self, params, rows, base=None: 0.0 * rows[1] - 6.0)
    rows = [{"answer": "yes"}, {"answer": "no"}, {"answer": "no"}]
    assert learned_once(tmp_path, monkeypatch, name="other.jsonl", rows=rows) == pytest.approx(np.exp(-6.0))
    # Three answers of 6 nats, of 4 + 3 + 3 tokens with their ends; the batch of 16 is filled up.
    assert "| held-out answers 0.002, 1.800 nats per token |" in capfd.readouterr().out


def test_rows_without_an_answer_to_learn_from_are_skipped_where_bad_rows_are(tmp_path, monkeypatch, capfd):
    rows = [{"answer": "yes"}, {"answer": "abcd"}, {"no": 1}]
    with refused_row("other.jsonl", 2, "prompts.bad_row='skip'"):
        learned_once(tmp_path, monkeypatch, name="other.jsonl", rows=rows)
    (tmp_path / "other.jsonl").unlink()
    capfd.readouterr()
    learned_once(tmp_path, monkeypatch, name="other.jsonl", rows=[*rows, {"prompt": 7}], bad_row="skip")
    no_prompt, too_long, no_answer = capfd.readouterr().err.splitlines()
    path = tmp_path / "other.jsonl"
    check_row(no_prompt, path, 4)
    check_row(too_long, path, 2, "5 tokens", "sampling.max_completion_tokens=4")
    check_row(no_answer, path, 3, "answer=None")
    with refused_row(path, 1, "5 tokens"):
        learned_once(tmp_path, monkeypatch, name="other.jsonl", rows=[rows[1]] * 2, bad_row="skip")


@pytest.mark.tier("slow")  # plain: test_what_is_learned_is_in_the_folder; moments in test_low_memory.py
def test_moments_in_host_memory_learn_the_same(tmp_path, monkeypatch):
    one, seen = mesh_of(ONE), []
    monkeypatch.setattr(sharding, "make_mesh", lambda _: one)
    keep = lambda programs, mesh: seen.append(programs) or compile_all(programs, mesh)
    monkeypatch.setattr("jaxrl_llm.commands.sft.compile_all", keep)
    kinds, files = [], []
    for name, offload in (("device", False), ("host", True)):
        given = settings(tmp_path, num_iterations=3, optimizer={"learning_rate": 1e-2, "offload": offload})
        sft(freeze(given), tmp_path / name)
        moments = [x for x in jax.tree.leaves(seen[-1]["step"].args[1]) if x.ndim]
        kinds.append({x.sharding.memory_kind for x in moments})
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert kinds == [{"device"}, {"pinned_host"}] and files[0] == files[1]


def test_a_loss_that_is_not_finite_writes_no_model(tmp_path, monkeypatch):
    one = mesh_of(ONE)
    monkeypatch.setattr(sharding, "make_mesh", lambda _: one)
    monkeypatch.setattr(Supervised, "loss", lambda _, params, *__: jax.numpy.nan * optax.tree.norm(params))
    with refused("optimizer.learning_rate", 0.01, "nan", "step 20"):
        sft(freeze(settings(tmp_path)), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_bad_input_is_one_line(tmp_path, monkeypatch, capfd):
    path = pathlib.Path(__file__).parents[1] / "configs" / "study_arithmetic_sft.py"

    def command(*arguments):
        given = (f"--config={path}", f"--out={tmp_path / 'out'}", *arguments)
        done = run_command("sft", *given, monkeypatch=monkeypatch, capfd=capfd)
        assert done.status == 2 and done.err.count("\n") == 1 and not (tmp_path / "out").exists()
        return done.err

    check_refusal(command("--until=0.0"), "--until", 0.0)
    nothing = ("--config.eval.num_prompts=0", "--config.eval.name=")
    check_refusal(command(*nothing), "eval.every_iterations", 10, "eval.num_prompts=0")
    check_refusal(command(*nothing, "--config.eval.every_iterations=0"), "eval.num_prompts", 0)
    few = command("--config.sampling.max_completion_tokens=2")
    check_refusal(few, "sampling.max_completion_tokens", 2)
    long = command("--config.prompts.max_tokens=9000", "--config.sampling.max_completion_tokens=6")
    check_refusal(long, "prompts.max_tokens", 9000, "sampling.max_completion_tokens=6")
    small = command("--config.update.batch_size=4", "--config.update.micro_batch_size=4")
    check_refusal(small, "update.batch_size", 4, "8 devices")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text('{"architectures": []}')
    adapters = freeze(settings(tmp_path) | {"model": {"path": "random:debug", "lora": {"rank": 4}}})
    with refused(str(tmp_path / "full"), ANY, "config.json", "adapters"):
        sft(adapters, tmp_path / "full")
    with refused("update.load_balance", 0.01):
        sft(freeze(settings(tmp_path, update={"batch_size": 16, "load_balance": 0.01})), tmp_path)
    with refused("answer", None):
        sft(freeze(settings(tmp_path) | {"prompts": {"source": "letters"}}), tmp_path)
