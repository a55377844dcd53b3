"""The properties of a whole step hold for every recipe, from rewards through the ring to the gradient.

Each recipe keeps its method at smaller sizes, and rollouts are made by hand. One compiled iteration (credit, ring,
draw, every update) serves all properties that need no other shapes; only the inputs differ. The batch is the whole
first iteration, so every draw contains all rows.
"""

import dataclasses
import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import QUICK_TO_COMPILE
from reference import recipes as oracle
from reference import sampling as sampling_oracle
from reference import transformer
from support.building import EIGHT, ONE, host_params, learner_params, mesh_of
from support.tiers import mostly_in

from jaxrl_llm.algorithms.baselines import num_features
from jaxrl_llm.config import freeze
from jaxrl_llm.learner import credit
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime import sharding
from jaxrl_llm.runtime.checkpoint import Checkpointer
from jaxrl_llm.runtime.checkpoint_files import MEMORY
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, STOP_EOS, STOP_LENGTH, Rewards, Rollout, Scores, TrainState

FOLDER = pathlib.Path(__file__).parents[2] / "jaxrl_llm" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))

SMALL = Architecture(vocab_size=32, width=8, num_layers=1, num_heads=2, num_kv_heads=1, head_size=4, ffn=16)
# How functions combine into a loss needs no layers: embedding, norm and head give log-probs, and it compiles faster.
BARE = dataclasses.replace(SMALL, num_layers=0)
PROMPT_TOKENS, COMPLETION_TOKENS = 4, 8
ROW_TOKENS = PROMPT_TOKENS + COMPLETION_TOKENS
NUM_ROWS = 32  # eight devices with a group of four each
FAILED = np.arange(NUM_ROWS) % 8 == 5  # rows whose reward failed

# Its state is the sum of the gradients, as the real update handed them over; its steps are small and plain.
RECORDER = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda gradient, total, _: (
        jax.tree.map(lambda g: -0.01 * g, gradient),
        jax.tree.map(jnp.add, total, gradient),
    ),
)


@functools.cache
def config_of(recipe, micro_batch_size=NUM_ROWS, updates=0):
    """Return the recipe's settings on 32 rollouts per iteration, with a ring of as many iterations.

    ``updates`` is the number of updates in an iteration; 0 = the recipe's own.
    """
    spec = importlib.util.spec_from_file_location(recipe, FOLDER / f"{recipe}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    own = freeze(config)
    config.replay.max_uses = 0 if own.update.batch_size < own.rows_per_iteration else own.replay.max_uses  # minibatches
    group_size = min(own.rollout.group_size, 4)
    config.rollout.group_size, config.rollout.prompts_per_iteration = group_size, NUM_ROWS // group_size
    config.replay.capacity = own.ring_capacity // own.rows_per_iteration * NUM_ROWS
    config.external.paths, config.external.groups_per_iteration = (), 0  # rows of others are rows like any
    if own.environments.factory:
        config.environments.max_answer_tokens = 2
    config.rollout.lookahead_prompts = config.rollout.max_lag_iterations = 0  # rollouts are made by hand
    config.rollout.stale_cache, config.rollout.slots = "recompute", 0
    config.update.updates_per_iteration = updates or own.update.updates_per_iteration
    config.update.scaled_from_batch_size = 0
    config.update.batch_size, config.update.micro_batch_size = NUM_ROWS, micro_batch_size
    config.prompts.max_tokens, config.sampling.max_completion_tokens = PROMPT_TOKENS, COMPLETION_TOKENS
    if own.algorithm.advantage.name == "gdpo":  # one part would be like any other
        config.rewards.functions, config.rewards.weights = ("a", "b"), (1.0, 0.5)
    return freeze(config)


class Iteration:
    """One compiled iteration of a recipe, from finished rollouts to new weights."""

    def __init__(self, config, mesh):
        run = assemble(config, SMALL, (5,), mesh_of(mesh))
        critic = RECORDER if config.has_critic else None
        update = dataclasses.replace(run.learner.update, optimizer=RECORDER, critic_optimizer=critic)
        run = dataclasses.replace(run, learner=dataclasses.replace(run.learner, update=update))
        programs = run.programs()
        insert, update = programs["insert"].fn, programs["update"].fn
        annotation = run.learner.annotation  # these are made by hand
        annotation = dataclasses.replace(annotation, columns=annotation.columns - {"ref_logp", "generation_logp"})
        self._empty_ring = jax.device_get(programs["init_ring"].fn())

        def both(state, ring, rows, iteration, key):
            rollout, scores, columns = rows
            columns = annotation.annotate(state, None, rollout) | columns
            ring, made = insert(ring, rollout, scores, columns, iteration)
            state, ring, used = update(state, ring, iteration, key)
            return state, ring, made, used

        self._run, self._jitted = run, jax.jit(both, compiler_options=QUICK_TO_COMPILE)

    def start(self):
        params = learner_params(self._run.model, self._run.mesh)
        config, copy = self._run.config, lambda: jax.tree.map(jnp.copy, params)
        kept = {"average": config.keeps_average, "previous": config.keeps_previous}
        kept |= {"reference": config.algorithm.reference_reset_iterations}
        ring = jax.device_put(self._empty_ring, sharding.leading(self._run.mesh, self._empty_ring))
        learned = {"policy": params} | ({"critic": self._critic()} if config.has_critic else {})
        others = {name: copy() for name, keeps in kept.items() if keeps}
        opt_state = {name: RECORDER.init(x) for name, x in learned.items()}
        return TrainState(learned, opt_state, self._whole(np.int32(0)), others), ring

    def _critic(self):
        head = critic_head(self._run.learner.abstract_state.params["critic"])
        return jax.device_put(head, sharding.replicated(self._run.mesh, head))

    def __call__(self, state, ring, rows, iteration=0):
        """Return state, ring, and the sums of the inserted rows and of the updates."""
        run, (rollout, scores, columns) = self._run, rows
        layout = jax.tree.map(lambda x: x.sharding, (run.learner.abstract_rollout, run.learner.abstract_scores))
        rows = (
            *jax.device_put((rollout, scores), layout),
            jax.device_put(columns, sharding.leading(run.mesh, columns)),
        )
        with jax.sharding.use_abstract_mesh(self._run.mesh.abstract_mesh):
            return self._jitted(state, ring, rows, self._whole(np.int32(iteration)), self._whole(jax.random.key(0)))

    def gradient(self, rows):
        """Return the sum of the gradients of a first iteration, flat float32, and the sums for the metrics."""
        state, _, _, used = self(*self.start(), rows)
        return np.concatenate([np.ravel(g) for g in jax.tree.leaves(state.opt_state)]), jax.device_get(used)

    def memory(self, ledger):
        """Return the method's empty memory of earlier rewards."""
        return self._run.learner.memory(ledger)

    def _whole(self, x):
        return jax.device_put(x, sharding.replicated(self._run.mesh, 0))


# --- rollouts by hand ---


@functools.cache
def make_rollout(group_size, *, lengths="ragged", seed=0, has_turns=False, arch=SMALL):
    """Return rollouts. Every other row has the model's own log-probs; the other rows have those of another policy.

    ``lengths`` of completions: "ragged", "by_group" (equal in a group) or "full" (all truncated). With turns, the third
    and the sixth token of a completion that continues after them are an environment's answers, each token 3 or 4.
    """
    rng = np.random.default_rng(seed)
    group = np.arange(NUM_ROWS) // group_size
    first = group * group_size
    prompt_length = rng.integers(1, PROMPT_TOKENS + 1, NUM_ROWS)[first]
    ragged = rng.integers(1, COMPLETION_TOKENS + 1, NUM_ROWS)
    completion = {"ragged": ragged, "by_group": ragged[first], "full": 0 * ragged + COMPLETION_TOKENS}[lengths]
    length = prompt_length + completion
    at = np.arange(ROW_TOKENS)[None, :]
    mask = (at >= prompt_length[:, None]) & (at < length[:, None])
    tokens = rng.integers(0, SMALL.vocab_size, (NUM_ROWS, ROW_TOKENS))
    tokens = np.where(at < prompt_length[:, None], tokens[first], tokens)
    place = at - prompt_length[:, None]
    is_answer = has_turns & ((place == 2) | (place == 5)) & (place < completion[:, None] - 1)
    tokens = np.where(is_answer, 3 + tokens % 2, tokens)
    drawn = mask & ~is_answer
    params = host_params(Model(arch))
    logp = np.stack(
        [transformer.completion_logp(params, arch, *row) for row in zip(tokens, prompt_length, length, strict=True)]
    )
    logp += np.where(np.arange(NUM_ROWS) % 2, 0.3, 0.0)[:, None] * rng.normal(size=logp.shape)
    return Rollout(
        tokens=np.where(at < length[:, None], tokens, 0).astype(np.int32),
        prompt_length=prompt_length.astype(np.int32),
        length=length.astype(np.int32),
        behaviour_logp=np.where(drawn, np.minimum(logp, -0.01), 0.0).astype(np.float32),
        group_id=(100 + group).astype(np.int32),
        policy_version=np.where(drawn, 0, -1).astype(np.int32),
        stop_reason=np.where(completion == COMPLETION_TOKENS, STOP_LENGTH, STOP_EOS).astype(np.int8),
    )


def has_turns(config):
    return config.environments.factory != ""


def rollout_of(config, **how):
    return make_rollout(config.rollout.group_size, has_turns=has_turns(config), **how)


def turn_numbers(rollout):
    """Return the turn of each token that the policy drew, [B,S], from 0; -1 elsewhere."""
    drawn = rollout.policy_version >= 0
    begins = drawn & ~np.pad(drawn, ((0, 0), (1, 0)))[:, :-1]
    return np.where(drawn, np.cumsum(begins, axis=1) - 1, -1)


def by_turn(config, rollout, reward, rng=None):
    """Return the rewards of turns, [B, max_turns] f32, which add up to the reward.

    Without ``rng`` the last turn has all.
    """
    last = turn_numbers(rollout).max(axis=1)
    given = np.zeros((NUM_ROWS, config.environments.max_turns))
    if rng is not None:
        given = rng.choice([0.0, 0.25, -0.5], given.shape) * (np.arange(given.shape[1])[None, :] < last[:, None])
    given[np.arange(NUM_ROWS), last] = reward - given.sum(axis=1)
    return given.astype(np.float32)


def make_rows(config, rollout, reward=None, *, seed=0):
    """Return (rollout, scores, columns of log-probs) as arguments of an iteration, in numpy."""
    rng = np.random.default_rng(seed)
    is_given = reward is not None
    reward = reward if is_given else rng.choice([0.0, 0.25, 1.0], NUM_ROWS)
    advantage, parts, of_rows, memory = config.algorithm.advantage, (), {}, {}
    if advantage.name == "gdpo":
        parts = reward.astype(np.float32), (reward**2).astype(np.float32)
    remembered = advantage.facts.memory.columns if advantage.facts.memory else ()
    for name in remembered:
        of_rows[name] = rng.uniform(0.2, 0.8, NUM_ROWS).astype(np.float32)
    if advantage.name == "poise":
        x, y = rng.random((30, num_features(SMALL.width))), rng.random((30, 1))
        memory["regression"] = (x.T @ np.concatenate([x, y], axis=1)).astype(np.float32)
    if advantage.settings.get("norm_decay"):
        memory["moments"] = np.zeros(3, np.float32)
    if "turn_reward" in config.algorithm.columns:
        given = by_turn(config, rollout, reward, None if is_given else np.random.default_rng(seed + 1))
        of_rows["turn_reward"] = np.where(FAILED[:, None], 0, given)
    if "reward_mask" in config.algorithm.columns:
        masked = np.random.default_rng(seed + 2).random((NUM_ROWS, COMPLETION_TOKENS)) < 0.3
        of_rows["reward_mask"] = masked.astype(np.float32)
    for name in config.reward_columns.keys() - of_rows.keys():
        shape = (NUM_ROWS, *config.reward_columns[name])
        of_rows[name] = np.random.default_rng(seed + 3).random(shape).astype(np.float32)
    known = np.where(FAILED, 0, reward).astype(np.float32)
    scores = Scores(known, ~FAILED, rollout.group_id, parts, of_rows, memory)
    columns = make_columns(config, rollout, rng)
    if config.keeps_entropy:
        entropy = np.where(rollout.behaviour_logp < 0, rng.uniform(0, 3, rollout.behaviour_logp.shape), 0)
        rollout = rollout.with_columns(entropy=entropy.astype(np.float32))
    return rollout, scores, columns


def make_columns(config, rollout, rng):
    """Return log-probs under the reference, and the learner's at generation.

    The latter may be rounded unlike the sampler's.
    """

    def near(spread):
        noise = spread * rng.normal(size=rollout.behaviour_logp.shape)
        return np.where(rollout.behaviour_logp < 0, rollout.behaviour_logp + noise, 0.0).astype(np.float32)

    spreads = {"ref_logp": 0.2} if config.keeps_reference else {}
    spreads |= {"generation_logp": 0.001} if config.keeps_old_logp else {}
    return {name: near(spread) for name, spread in spreads.items()}


def poisoned(rows, seed=1):
    """Return the same rows with random values in all padding and in rows whose reward failed."""
    (rollout, scores, columns), rng = rows, np.random.default_rng(seed)
    at = np.arange(ROW_TOKENS)[None, :]
    past, prompt = at >= rollout.length[:, None], at < rollout.prompt_length[:, None]
    off = past | prompt | FAILED[:, None]
    spoil = lambda x, where, value: None if x is None else np.where(where, value, x).astype(x.dtype)
    rollout = rollout.replace(
        tokens=spoil(rollout.tokens, off & ~prompt, rng.integers(0, SMALL.vocab_size, off.shape)),
        behaviour_logp=spoil(rollout.behaviour_logp, off, np.nan),
        policy_version=spoil(rollout.policy_version, off, 0),
        columns={name: spoil(x, off, np.nan) for name, x in rollout.columns.items()},
    )
    scores = scores.replace(
        reward=spoil(scores.reward, FAILED, np.nan), parts=tuple(spoil(part, FAILED, np.nan) for part in scores.parts)
    )
    return rollout, scores, {name: spoil(x, off, np.nan) for name, x in columns.items()}


def reordered(rows, order):
    """Return the same rows in another order. Values that do not belong to a row stay."""
    rollout, whole, columns = rows
    rows = rollout, whole.replace(memory={}), columns
    rollout, scores, columns = jax.tree.map(lambda x: x[order], rows)
    return rollout, scores.replace(memory=whole.memory), columns


# --- the laws ---


def assert_same(actual, expected):
    """Assert that gradients agree to 1e-5 of the norm, and sums to 1e-5."""
    (gradient, sums), (gradient_expected, sums_expected) = actual, expected
    assert np.linalg.norm(gradient - gradient_expected) <= 1e-5 * np.linalg.norm(gradient_expected)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, sums, sums_expected)


@functools.cache
def first(recipe):
    """Return config, compiled iteration, rows, and the gradient and sums of the first iteration."""
    config = config_of(recipe)
    iteration = Iteration(config, ONE)
    rows = make_rows(config, rollout_of(config))
    return config, iteration, rows, iteration.gradient(rows)


def most_in_tier(*quick, recipes=RECIPES):
    """Parametrize by recipe. Each recipe compiles programs of its own, so the plain suite has only ``quick``."""
    return pytest.mark.parametrize("recipe", mostly_in("recipes", recipes, plain=quick))


def loss_of(run, config):
    """Return a compiled function: the loss of the first update after credit, without gradients and without a ring."""
    critic = RECORDER if config.has_critic else None
    update = dataclasses.replace(run.learner.update, optimizer=RECORDER, critic_optimizer=critic)
    annotation = run.learner.annotation
    annotation = dataclasses.replace(annotation, columns=annotation.columns - {"ref_logp", "generation_logp"})

    @jax.jit
    def loss(state, start, rows, iteration):
        rollout, scores, columns = rows
        columns = annotation.annotate(state, None, rollout) | columns
        experience, _ = credit.assign(rollout, scores, columns, config)
        if config.replay.skip_tied:  # as the ring draws
            trainable = experience.trainable & ~experience.columns["tied"]
            experience = dataclasses.replace(experience, trainable=trainable)
        batch = jax.tree.map(lambda x: x[None], experience)
        before = dataclasses.replace(state, params=state.params | {"policy": start})
        sums = update.apply_batch(state, batch, iteration, before)[1]
        return {name: sums[name] for name in ("loss_sum", "clipped_count")}

    def call(*arguments):
        with jax.sharding.use_abstract_mesh(run.mesh.abstract_mesh):
            return loss(*jax.device_put(arguments, sharding.replicated(run.mesh, 0)))

    return call


def critic_head(abstract):
    """Return a head that has learned something."""
    rng = np.random.default_rng(7)
    return {name: (0.3 * rng.normal(size=abstract[name].shape)).astype(np.float32) for name in ("bias", "kernel")}


# --- what the papers say ---


def batch_of(config, rows, critic, others=None, arch=SMALL):
    """Return the rows with a reward in the form of tests/reference/recipes.py, computed by a float64 model.

    ``others`` has the weights of other policies by name; the others equal the current policy.
    """
    rollout, scores, columns = rows
    params, batch = host_params(Model(arch)), []
    for i in np.flatnonzero(~FAILED):
        tokens, first, end = rollout.tokens[i], rollout.prompt_length[i], rollout.length[i]
        states = transformer.hidden(params, arch, tokens[:end])[:-1]
        logits = transformer.logits(params, arch, tokens[:end])[:-1]
        drawn = rollout.policy_version[i, first:end] >= 0

        def of_tokens(x, i=i, first=first, end=end, drawn=drawn):
            return None if x is None else x[i, first:end][drawn].astype(float).tolist()

        def taken(temperature, logits=logits, tokens=tokens, end=end):
            """Return log-probabilities [T - 1, V], and the log-probabilities of the next tokens."""
            logp = np.log([sampling_oracle.softmax(x / temperature) for x in logits])
            return logp, logp[np.arange(end - 1), tokens[1:end]]

        logp, policy = taken(config.sampling.temperature)
        row = {
            "group": int(rollout.group_id[i]),
            "reward": float(scores.reward[i]),
            "policy": policy[first - 1 :][drawn].tolist(),
            "policy_entropy": -(np.exp(logp) * logp).sum(axis=1)[first - 1 :][drawn],
            "prompt": taken(1.0)[1][: first - 1].tolist(),
            "answers": taken(1.0)[1][first - 1 :][~drawn].tolist(),
            "behaviour": of_tokens(rollout.behaviour_logp),
            "ref": of_tokens(columns.get("ref_logp")),
            "generation": of_tokens(columns.get("generation_logp")),
            "entropy": of_tokens(rollout.columns.get("entropy")),
            "hidden": states[first - 1 :].mean(axis=0).tolist(),
        }
        for name in ("start", "average", "previous"):
            row[name] = row["policy"]
            if others and name in others:
                how = {"temperature": config.sampling.temperature}
                given = others[name], arch, tokens, int(first), int(end)
                row[name] = transformer.completion_logp(*given, **how)[first:end].tolist()
        row["parts"] = [float(part[i]) for part in scores.parts]
        row |= {name: float(x[i]) for name, x in scores.columns.items() if x.ndim == 1}
        if critic is not None:
            kernel, bias = critic["kernel"].astype(float), critic["bias"].astype(float)
            row["value"] = (states[first - 1 :] @ kernel + bias)[:, 0][drawn].tolist()
        if "turn_reward" in scores.columns:
            row |= turns_of(rollout, scores, i)
        if "reward_mask" in scores.columns:
            row["masked"] = scores.columns["reward_mask"][i].tolist()
        batch.append(row)
    return batch


def turns_of(rollout, scores, i):
    """Return the parts of a row that the turns' oracle reads:

    rewards and states of turns, and each drawn token's turn.
    """
    number, first = turn_numbers(rollout)[i], int(rollout.prompt_length[i])
    states, histories, ends = [], [], 0
    for k in range(number.max() + 1):
        places = np.flatnonzero(number == k)
        states.append(tuple(rollout.tokens[i, ends : places[0]].tolist()))
        histories.append(tuple(rollout.tokens[i, : places[0]].tolist()))
        ends = places[-1] + 1
    given = scores.columns["turn_reward"][i, : len(states)].astype(float).tolist()
    turns = {"turns": given, "states": states, "histories": histories}
    return turns | {"turn": number[first:][number[first:] >= 0].tolist()}


def expected_loss(recipe, config, rows, critic, arch=SMALL):
    """Return the loss by the paper's equation."""
    batch = batch_of(config, rows, critic, arch=arch)
    further = {"regression": rows[1].memory["regression"]} if recipe == "poise" else {}
    return oracle.LOSSES[recipe](batch, COMPLETION_TOKENS, **further)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_loss_is_that_of_the_papers_equation(recipe):
    """Rows have unequal lengths and probabilities, and every other row was drawn by another policy.

    Only the forward pass is compiled: rewards, credit and every term of the loss.
    """
    config = config_of(recipe, updates=1)
    run = assemble(config, BARE, (5,), mesh_of(ONE))
    rows = make_rows(config, rollout_of(config, arch=BARE))
    params = host_params(run.model)
    learned = {"policy": params}
    critic = None
    if config.has_critic:
        critic = critic_head(run.learner.abstract_state.params["critic"])
        learned["critic"] = critic
    others = {"average": config.keeps_average, "previous": config.keeps_previous}
    others = {name: params for name, is_kept in others.items() if is_kept}
    optimizers = {name: RECORDER.init(weights) for name, weights in learned.items()}
    state = TrainState(learned, optimizers, np.int32(0), others)
    sums = loss_of(run, config)(state, params, rows, np.int32(0))
    # Measured: 3e-6 at most.
    np.testing.assert_allclose(sums["loss_sum"], expected_loss(recipe, config, rows, critic, BARE), rtol=3e-5)


@most_in_tier("cispo")
def test_the_first_loss_of_a_whole_iteration_is_that_of_the_papers_equation(recipe):
    """The rows go through the ring, and the update has gradients."""
    config = config_of(recipe, updates=1)
    iteration = first(recipe)[1] if config == config_of(recipe) else Iteration(config, ONE)
    rows = make_rows(config, rollout_of(config))
    state, ring = iteration.start()
    critic = jax.device_get(state.params.get("critic"))
    _, _, _, used = iteration(state, ring, rows)
    # Measured: 3e-6 at most.
    np.testing.assert_allclose(used["loss_sum"], expected_loss(recipe, config, rows, critic), rtol=3e-5)


# Those that look at policies beside the current one.
@most_in_tier("remix", recipes=["decoupled_ppo", "kimi_k15", "ppo_ewma", "remix", "rr", "t1"])
def test_a_later_loss_is_that_of_the_papers_equation(recipe):
    """As above, but several policies differ.

    They are the weights before the iteration, two iterations before, and on average.
    """
    config, iterations = config_of(recipe), 65
    run = assemble(config, BARE, (5,), mesh_of(ONE))
    rows = make_rows(config, rollout_of(config, arch=BARE))
    params = host_params(run.model)
    noise = lambda name, x: 0.3 * np.random.default_rng(len(name)).normal(size=x.shape)
    others = {
        name: jax.tree.map(lambda x, name=name: (x + noise(name, x)).astype(np.float32), params)
        for name in ("start", "average", "previous")
    }
    kept = {"average": config.keeps_average, "previous": config.keeps_previous}
    state = TrainState(
        {"policy": params},
        {"policy": RECORDER.init(params)},
        np.int32(iterations * config.update.updates_per_iteration),
        {name: others[name] for name, keeps in kept.items() if keeps},
    )

    used = loss_of(run, config)(state, others["start"], rows, np.int32(iterations))
    batch = batch_of(config, rows, None, others, BARE)
    given = {"iteration": iterations} if recipe == "remix" else {}
    expected = oracle.LOSSES[recipe](batch, COMPLETION_TOKENS, **given)
    # Measured: 2e-6 at most.
    np.testing.assert_allclose(used["loss_sum"], expected, rtol=2e-5)
    assert used["clipped_count"] > 0 or recipe == "kimi_k15"
    # Without the other policies it would be another loss.
    batch = batch_of(config, rows, None, arch=BARE)
    without = oracle.LOSSES[recipe](batch, COMPLETION_TOKENS, **given)
    assert abs(without / expected - 1) > 1e-3


def test_every_recipe_has_its_equation():
    assert set(RECIPES) <= set(oracle.LOSSES)


def test_every_recipe_says_how_its_tokens_are_added_up():
    """Once, recipes that left this setting at the default were wrong."""
    says = "config.algorithm.aggregation = use("
    assert not [recipe for recipe in RECIPES if says not in (FOLDER / f"{recipe}.py").read_text()]


# One compiled iteration of the recipe serves all laws of the plain suite.
every_recipe = most_in_tier("cispo")


@every_recipe
def test_padding_prompts_and_failed_rows_change_no_bit(recipe):
    _, iteration, rows, expected = first(recipe)
    assert np.linalg.norm(expected[0]) > 1e-3 and expected[1]["skipped_count"] == 0
    jax.tree.map(np.testing.assert_array_equal, iteration.gradient(poisoned(rows)), expected)


@every_recipe
def test_order_changes_nothing(recipe):
    config, iteration, rows, expected = first(recipe)
    # Rows of a group stay together where the learner is told that neighbours are one, or asked about fresh rollouts.
    is_asked = config.has_critic or "hidden" in config.algorithm.columns
    unit, rng = config.rollout.group_size if is_asked else config.rows_per_draw, np.random.default_rng(2)
    order = rng.permutation(np.arange(NUM_ROWS).reshape(-1, unit)).ravel()
    assert_same(iteration.gradient(reordered(rows, order)), expected)


@every_recipe
def test_the_decision_to_stop_is_trained(recipe):
    # Nothing follows a row's last token: it counts as a target or not at all.
    _, iteration, (rollout, *rest), (expected, _) = first(recipe)
    row, tokens = np.arange(NUM_ROWS), rollout.tokens.copy()
    tokens[row, rollout.length - 1] = (tokens[row, rollout.length - 1] + (row % 2 == 0)) % SMALL.vocab_size
    gradient, _ = iteration.gradient((rollout.replace(tokens=tokens), *rest))
    assert np.linalg.norm(gradient - expected) > 1e-2 * np.linalg.norm(expected)


@every_recipe
def test_a_batch_that_was_cut_off_throughout_is_finite(recipe):
    config, iteration, *_ = first(recipe)
    rows = make_rows(config, rollout_of(config, lengths="full"))
    gradient, sums = iteration.gradient(rows)
    assert (rows[0].stop_reason == STOP_LENGTH).all()
    assert np.isfinite(gradient).all() and all(np.isfinite(x).all() for x in jax.tree.leaves(sums))
    assert np.linalg.norm(gradient) > 1e-3 and sums["skipped_count"] == 0


@every_recipe
def test_tied_groups_teach_what_the_papers_equation_says(recipe):
    """The rewards of each group are equal: 0 and 1 in alternate groups, or 0 in all groups.

    - Both losses of the paper are 0: the gradient is 0.
    - The losses are equal: another term of the loss teaches, and the gradient does not depend on the rewards.
    - The losses differ: the advantage compares with more than the group, and the gradient depends on the rewards.
    """
    config, iteration, *_ = first(recipe)
    # Lengths are equal in a group too: what shapes a reward by length ties nothing and unties nothing.
    rollout = rollout_of(config, lengths="by_group")
    turns = (np.arange(NUM_ROWS) // config.rollout.group_size % 2).astype(np.float32)
    gradient, _ = iteration.gradient(make_rows(config, rollout, turns))
    all_wrong, _ = iteration.gradient(make_rows(config, rollout, 0 * turns))
    difference, size = np.linalg.norm(gradient - all_wrong), np.linalg.norm(all_wrong)
    critic = jax.device_get(iteration.start()[0].params.get("critic"))
    losses = [tied_loss(recipe, config, rollout, reward, critic) for reward in (turns, 0 * turns)]
    if losses == [0, 0]:
        # At the first update the log-ratio of Kimi k1.5 is 0 but for rounding.
        assert np.linalg.norm(gradient) < 1e-6 if recipe == "kimi_k15" else not gradient.any()
    elif losses[0] == pytest.approx(losses[1], rel=1e-9):
        # Measured: 5e-4 at least, where there is nothing but a KL of weight 0.001 (ttrl).
        assert size > 2e-4 and difference <= 1e-5 * size
    else:
        assert difference > 1e-2


def tied_loss(recipe, config, rollout, reward, critic):
    """Return the paper's loss of rewards that are equal in each group; 0 if its equation leaves out all rows."""
    try:
        return expected_loss(recipe, config, make_rows(config, rollout, reward), critic)
    except ZeroDivisionError:
        return 0


@every_recipe
def test_stopped_and_resumed_is_bitwise_the_whole(recipe, tmp_path):
    config, iteration, *_ = first(recipe)
    questions = list(range(config.rollout.prompts_per_iteration))

    def advance(state, ring, memory, index):
        rng = np.random.default_rng(index)
        rollout, _, _ = make_rows(config, rollout_of(config, seed=index), seed=index)
        total = np.where(FAILED, np.nan, rng.choice([0.0, 0.25, 1.0], NUM_ROWS)).astype(np.float32)
        parts = {name: total**power for power, name in enumerate(config.rewards.functions, start=1)}
        outcome = np.where(FAILED, OUTCOME_ERROR, OUTCOME_SCORE).astype(np.int8)
        of_turns = by_turn(config, rollout, total, rng) if has_turns(config) else None
        masked = np.stack([rng.random(COMPLETION_TOKENS) < 0.3 for _ in total]).astype(np.float32)
        columns = {"reward_mask": masked} if of_turns is None else {"reward_mask": masked, "turn_reward": of_turns}
        rewards = Rewards(total, parts, outcome, columns=columns)
        rows = rollout, memory.scores(rewards, questions), make_columns(config, rollout, rng)
        state, ring, made, used = iteration(state, ring, rows, index)
        memory.observe(rewards, questions, jax.device_get(used | made))
        return state, ring, made, used

    ledger = Ledger()
    memory = iteration.memory(ledger)
    state, ring, *_ = advance(*iteration.start(), memory, 0)
    remembered = {MEMORY + name: jnp.array(x) for name, x in memory.arrays().items()}
    arrays, checkpoints = {"train": state, "ring": ring, **remembered}, Checkpointer(tmp_path, config.checkpoint)
    checkpoints.save(1, arrays, {"memory": memory.state(), "ledger": ledger.state()}, config, pass_rate=None)
    expected = *advance(state, ring, memory, 1), memory.state(), memory.arrays(), ledger.state()

    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
    restored = checkpoints.restore(abstract, config, allow_config_changes=False)
    checkpoints.close()
    ledger = Ledger()
    memory = iteration.memory(ledger)
    remembered = {name: restored.device_state[MEMORY + name] for name in memory.arrays()}
    memory.restore(restored.host_state["memory"], remembered)
    ledger.restore(restored.host_state["ledger"])
    arrays = advance(restored.device_state["train"], restored.device_state["ring"], memory, 1)
    actual = *arrays, memory.state(), memory.arrays(), ledger.state()
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@most_in_tier("cispo")
def test_devices_change_nothing(recipe):
    _, _, rows, expected = first(recipe)
    assert_same(Iteration(config_of(recipe), EIGHT).gradient(rows), expected)


@most_in_tier("cispo")
def test_microbatches_change_nothing(recipe):
    _, _, rows, expected = first(recipe)
    assert_same(Iteration(config_of(recipe, micro_batch_size=8), ONE).gradient(rows), expected)
