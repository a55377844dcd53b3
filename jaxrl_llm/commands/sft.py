"""Supervised fine-tuning on a task's own answers: it makes a model that reinforcement learning can begin with.

    python -m jaxrl_llm.sft --config=configs/study_arithmetic_sft.py --out=DIR [--until=0.2]

The loss is the cross-entropy of each question's column ``answer`` and of the end token after it. There are
``num_iterations`` optimizer steps on ``update.batch_size`` questions each. Every ``eval.every_iterations`` steps, or 20
times in total, the command measures the ``eval.num_prompts`` held-out questions. It stops when their answers have at
least the mean probability ``--until``. DIR is a Hugging Face folder that ``model.path`` reads.

The command uses these parts of the config:

- model, prompts, optimizer, seed, mesh
- ``sampling.max_completion_tokens``, the most tokens of an answer with its end
- ``update``: batch_size (in one pass), scaled_from_batch_size, logp_chunk_tokens, weights. load_balance is refused.

Owns: rows of questions and answers, this loop. Does not know: the model, its log-probs, the optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_flags

from jaxrl_llm.actor.evaluation import filled_batches, questions, report_skipped
from jaxrl_llm.config import Config, ConfigError, freeze
from jaxrl_llm.learner import low_memory, optim
from jaxrl_llm.models import lora
from jaxrl_llm.models.files import hf, peft, pretrained
from jaxrl_llm.models.files.source import Source
from jaxrl_llm.models.row_logp import PLAIN, chunk_tokens, row_logp
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.ops.masks import completion_mask
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.questions.stream import EncodedExample, PromptStream
from jaxrl_llm.run import model_of
from jaxrl_llm.runtime import cli, sharding
from jaxrl_llm.runtime.programs import Program, compile_all, use_cache
from jaxrl_llm.runtime.sharding import leading, put, replicated
from jaxrl_llm.types import Example, PromptBatch

FLAGS = flags.FLAGS

Rows = tuple[jax.Array, jax.Array, jax.Array]  # tokens [B,S], prompt_length [B], length [B], all i32


def answer_tokens(example: Example, tokenizer: Any, width: int, special_tokens: bool = False) -> list[int]:
    """Return the token ids of the question's answer and of the end after it.

    Args:
        width: most tokens allowed.
        special_tokens: the setting ``prompts.special_tokens``.

    Raises:
        ConfigError: the column ``answer`` is missing or no text, or there are more than ``width`` tokens.
    """
    answer = example.columns.get("answer")
    if not isinstance(answer, str):
        raise ConfigError(f"{example.origin}: column answer={answer!r} must be a text to learn from")
    ids = [*tokenizer.encode(answer, special_tokens=special_tokens), tokenizer.end_id]
    if len(ids) > width:
        raise ConfigError(
            f"{example.origin}: {len(ids)} tokens of answer and end are over sampling.max_completion_tokens={width}"
        )
    return ids


def learnable(
    rows: Sequence[EncodedExample], tokenizer: Any, config: Config
) -> tuple[list[EncodedExample], list[str], int]:
    """Select the rows that have an answer to learn from.

    Returns:
        The rows, a message for each row that is left out, and the number of tokens of all answers.

    Raises:
        ConfigError: ``answer_tokens`` refuses a row under ``prompts.bad_row="error"``, or it refuses all rows.
    """
    width = config.sampling.max_completion_tokens
    kept = []
    left_out = []
    num_tokens = 0
    for row in rows:
        try:
            tokens = answer_tokens(row.example, tokenizer, width, config.prompts.special_tokens)
        except ConfigError as error:
            if config.prompts.bad_row == "error":
                raise ConfigError(f"{error} (prompts.bad_row='skip' leaves such rows out)") from error
            left_out.append(str(error))
            continue
        num_tokens += len(tokens)
        kept.append(row)
    if not kept:
        raise ConfigError(f"no question is left: {len(left_out)} are left out ({left_out[0]})")
    return kept, left_out, num_tokens


def answer_rows(
    batch: PromptBatch, tokenizer: Any, width: int, special_tokens: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``Rows`` of question ++ answer ++ end, right-padded with 0 to L + width."""
    tokens = np.pad(batch.tokens, ((0, 0), (0, width)))
    length = np.array(batch.length)
    for row, example in enumerate(batch.examples):
        answer = answer_tokens(example, tokenizer, width, special_tokens)
        tokens[row, length[row] : length[row] + len(answer)] = answer
        length[row] += len(answer)
    return tokens, np.array(batch.length), length


@dataclasses.dataclass(frozen=True)
class Supervised:
    """The programs of a run.

    Attributes:
        width: most tokens of an answer with its end.
        chunk: positions of each row whose logits exist at the same time.
        offload: the optimizer's moments are in the host's memory.
    """

    model: Model
    optimizer: optax.GradientTransformation
    width: int
    chunk: int
    offload: bool = False

    def logp(self, params: Any, rows: Rows, base: Any = None, *, remat: bool = False) -> jax.Array:
        """Return the log-probs of the answers' tokens [B,S] f32 nats, 0.0 elsewhere.

        Args:
            base: the base weights, if ``params`` are adapters.
        """
        return row_logp(
            self.model,
            lora.join(params, base),
            *rows,
            sampling=PLAIN,
            completion_width=self.width,
            chunk_positions=self.chunk,
            remat=remat,
        ).logp

    def loss(self, params: Any, rows: Rows, base: Any = None) -> jax.Array:
        """Return the cross-entropy in nats per answer token: one sum and one count over the batch."""
        tokens, prompt_length, length = rows
        count = jnp.sum(completion_mask(prompt_length, length, tokens.shape[1]))
        return -jnp.sum(self.logp(params, rows, base, remat=True)) / count

    def step(self, params: Any, opt_state: Any, rows: Rows, base: Any = None) -> tuple[Any, Any, jax.Array]:
        """Return the parameters and the optimizer's state after one step, and the loss before the step."""
        value, gradient = jax.value_and_grad(self.loss)(params, rows, base)
        updates, opt_state = self.optimizer.update(gradient, opt_state, params)
        # The last counter belongs to the schedule. Adam's own counter returns to 0 with optimizer.reset_every_steps.
        _, step = optax.tree_utils.tree_get_all_with_path(opt_state, "count")[-1]
        return low_memory.apply_updates(params, updates, step), opt_state, value

    def answer_logp(self, params: Any, rows: Rows, base: Any = None) -> jax.Array:
        """Return the log-prob of each row's whole answer [B] in nats."""
        return jnp.sum(self.logp(params, rows, base), axis=1)

    def programs(self, mesh: Mesh, batch_size: int, row_tokens: int) -> dict[str, Program]:
        """Return the three programs of a run, for batches of one size."""
        shapes = ((batch_size, row_tokens), (batch_size,), (batch_size,))
        rows = tuple(sharding.rows(mesh, shape, jnp.int32) for shape in shapes)
        params, *base = lora.split(self.model.abstract_params(mesh))
        opt_state = optim.abstract_state(self.optimizer, params, mesh, offload=self.offload)
        params_sharding, state_sharding = sharding.of((params, opt_state))
        whole = replicated(mesh, 0)
        learned = (params_sharding, state_sharding, whole)
        return {
            "init": Program(self.optimizer.init, (params,), state_sharding),
            "step": Program(self.step, (params, opt_state, rows, *base), learned, donate=(0, 1)),
            "answer_logp": Program(self.answer_logp, (params, rows, *base), whole),
        }


def sft(config: Config, out: pathlib.Path, *, until: float = 1.0) -> float:
    """Train on the answers of a task and write the folder ``out``.

    Args:
        out: folder of the trained model; it is made if it does not exist.
        until: stop when the held-out answers have at least this mean probability.

    Returns:
        Mean probability of the held-out answers at the end.

    Raises:
        ConfigError: bad input, before anything is compiled.
    """
    if not 0.0 < until <= 1.0:
        raise ConfigError(f"--until={until} must be more than 0 and at most 1")
    is_new = not os.path.exists(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise ConfigError(f"--out={out} cannot be a folder to write in: {error.strerror}") from error
    try:
        return _sft(config, out, until)
    except ConfigError:
        if is_new:
            with contextlib.suppress(OSError):  # the folder has files
                out.rmdir()
        raise


def _sft(config: Config, out: pathlib.Path, until: float) -> float:
    """Do the work of ``sft`` in a folder that can be written."""
    _check(config, out)
    use_cache(config.compilation_cache)
    mesh = sharding.make_mesh(config.mesh)
    source = pretrained.resolve(config.model.path)
    tokenizer = source.tokenizer()
    size = config.update.batch_size
    devices = sharding.num_data_shards(mesh)
    if size % devices:
        raise ConfigError(f"update.batch_size={size} must be a multiple of the {devices} devices it is split over")
    train_set, held_out, skipped = questions(config, tokenizer)
    train_set, left_out, _ = learnable(train_set, tokenizer, config)
    held_out, held_left_out, held_out_tokens = learnable(held_out, tokenizer, config)
    report_skipped(skipped + left_out + held_left_out)

    task = _task(config, source, mesh)
    compiled = compile_all(task.programs(mesh, size, config.row_tokens), mesh)
    base, _, begin = pretrained.weights(task.model, None, mesh, source, source, seed=config.seed)
    params = begin()
    base = () if base is None else (base,)
    opt_state = compiled["init"](params)
    stream = PromptStream(train_set, config.prompts, Ledger(), seed=config.seed)

    def rows(batch: PromptBatch) -> Rows:
        arrays = answer_rows(batch, tokenizer, task.width, config.prompts.special_tokens)
        return put(arrays, leading(mesh, arrays))

    def measured() -> tuple[float, float]:
        """Return the mean probability of the held-out answers, and their mean nats per token.

        If exactly one text is correct, this probability is the pass rate at temperature 1.
        """
        values: list[float] = []
        for batch in filled_batches(held_out, size):
            values += compiled["answer_logp"](params, rows(batch), *base).tolist()
        logp = np.array(values[: len(held_out)])
        return float(np.mean(np.exp(logp))), float(-np.sum(logp) / held_out_tokens)

    started = time.monotonic()
    reached = 0.0
    every = config.eval.every_iterations or max(1, config.num_iterations // 20)  # so that progress is visible
    for number in range(1, config.num_iterations + 1):
        params, opt_state, loss = compiled["step"](params, opt_state, rows(stream.next_batch(size)), *base)
        is_last = number == config.num_iterations
        if not is_last and number % every:
            continue
        reached, nats = measured()
        line = f"step {number} | loss {float(loss):.3f} | held-out answers {reached:.3f}, {nats:.3f} nats per token"
        print(f"{line} | {time.monotonic() - started:.0f} s", flush=True)
        if not math.isfinite(float(loss) + reached):
            rate = f"optimizer.learning_rate={config.optimizer.learning_rate}"
            raise ConfigError(f"the loss is {float(loss)} at step {number}: lower {rate}; {out} is not written")
        if reached >= until:
            break
    peft.export(params, task.model, tokenizer, out, config.model.path, like=source.folder)
    return reached


def _check(config: Config, out: pathlib.Path) -> None:
    """Raise a ``ConfigError`` for settings that this command does not have, or for a folder of other files."""
    if config.eval.num_prompts == 0:
        raise ConfigError("eval.num_prompts=0 must be at least 1: held-out questions show how far training is")
    if config.update.load_balance:
        raise ConfigError(f"update.load_balance={config.update.load_balance} must be 0.0: sft has no balance cost")
    hf.check_output(str(out), "--out")
    if config.model.lora.rank:
        peft.check_folder(out)


def _task(config: Config, source: Source, mesh: Mesh) -> Supervised:
    """Return the programs of a run: its model, its optimizer, and the positions whose logits exist at the same time."""
    size = config.update.batch_size
    width = config.sampling.max_completion_tokens
    devices = sharding.num_data_shards(mesh)
    model = model_of(config, source.architecture(), mesh)
    source.check_weights(model.base, mesh)
    optimizer = optim.make(config.scaled().optimizer, config.num_iterations)
    offload = config.optimizer.offload
    if offload:
        sharding.check_host_memory(mesh, "optimizer.offload", True, otherwise=False)
        optimizer = low_memory.offloaded(optimizer)
    tokens = chunk_tokens(
        config.update.logp_chunk_tokens,
        mesh.devices.flat[0],
        most=size * width // devices,
        vocab=model.arch.vocab_size,
        packed=False,
    )
    return Supervised(model, optimizer, width, chunk=max(1, tokens * devices // size), offload=offload)


def main() -> None:
    """Run the command with the values of its flags."""
    out = pathlib.Path(FLAGS.out)
    sft(freeze(FLAGS.config), out, until=FLAGS.until)
    print(f"model  {out}  (Hugging Face folder, for model.path)")


def define_flags() -> None:
    """Define the flags of the command."""
    config_flags.DEFINE_config_file("config", None, "Python file with get_config().")
    flags.DEFINE_string("out", None, "Folder to write.")
    flags.DEFINE_float("until", 1.0, "Stop when the held-out answers have this mean probability.")
    flags.mark_flags_as_required(["config", "out"])


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__)
