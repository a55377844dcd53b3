"""The learner: scored rollouts become new weights.

    scored rollouts -> annotation (log-probs, values) -> credit -> ring -> U updates

Owns: the learner's programs, their order in an iteration, the train state and the ring. Does not know: where rollouts
come from, weight files, time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms import corrections
from jaxrl_llm.algorithms import critic as values
from jaxrl_llm.algorithms.inputs import COLUMNS, COMPUTED_BY_LEARNER, Sizes
from jaxrl_llm.algorithms.memory import Memory
from jaxrl_llm.config import Config
from jaxrl_llm.learner import credit, optim, publish
from jaxrl_llm.learner.annotation import Annotation
from jaxrl_llm.learner.faults import Faults
from jaxrl_llm.learner.update import Update
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.replay import ring as replay
from jaxrl_llm.runtime import hosts, rng, sharding
from jaxrl_llm.runtime.checkpoint_files import MEMORY
from jaxrl_llm.runtime.programs import Program, release_freed
from jaxrl_llm.types import Experience, OpenRollouts, RingState, Rollout, ScoredRollouts, Scores, Sums, TrainState


@dataclasses.dataclass(frozen=True)
class LearnerPrograms:
    """Static parts of a learner. Abstract values are ``jax.ShapeDtypeStruct`` with shardings.

    Attributes:
        reference_model: model of the reference. It differs from ``model`` if the reference is a teacher.
        row_shapes: shapes of an actor's rollouts; the number of rows is ignored.
        open_rollouts: abstract sampler state with open rollouts if the learner scores open rollouts; else None.
    """

    config: Config
    mesh: Mesh
    reference_model: Model
    update: Update
    row_shapes: Rollout
    open_rollouts: OpenRollouts | None

    @property
    def model(self) -> Model:
        return self.update.model

    @functools.cached_property
    def params(self) -> Any:
        """Abstract trainable weights: the adapters if there are any, else all parameters."""
        return lora.split(self.model.abstract_params(self.mesh))[0]

    @functools.cached_property
    def base(self) -> tuple[Any, ...]:
        """Abstract frozen weights under adapters: (weights,), or () without adapters.

        Programs that take weights receive this tuple, unpacked, as their last argument.
        """
        _, *base = lora.split(self.model.abstract_params(self.mesh))
        return tuple(base)

    @property
    def loads_reference(self) -> bool:
        """Whether the run holds a constant reference. A reference that is reset lies in ``TrainState.others``."""
        return self.config.keeps_reference and not self.config.algorithm.reference_reset_iterations

    @functools.cached_property
    def reference(self) -> Any:
        """Abstract weights of the constant reference; None if ``loads_reference`` is False."""
        return self.reference_model.abstract_params(self.mesh) if self.loads_reference else None

    @property
    def frozen(self) -> dict[str, Any]:
        """All frozen weights by name. A base is also the reference unless ``model.reference_path`` is set."""
        frozen = {}
        is_base = bool(self.base) and not self.config.model.reference_path
        if self.base:
            frozen["base"] = self.base[0]
        if self.reference and not is_base:
            frozen["reference"] = self.reference
        return frozen

    @functools.cached_property
    def sampled(self) -> Rollout:
        """Abstract rollouts that the actor generates in an iteration."""
        return self._resized(self.config.rollouts_per_iteration)

    @functools.cached_property
    def abstract_rollout(self) -> Rollout:
        """Abstract rollouts that an iteration puts into the ring: generated and external rows."""
        return self._resized(self.config.rows_per_iteration)

    @functools.cached_property
    def abstract_external(self) -> Rollout:
        """Abstract external rows as the host has them: without log-probs, policy versions and columns."""
        rows = self._resized(self.config.rows_per_iteration - self.config.rollouts_per_iteration)
        absent: Any = None  # None has no leaf, so the program gets no array for these fields
        return dataclasses.replace(rows, behaviour_logp=absent, policy_version=absent, columns={})

    def _resized(self, B: int) -> Rollout:
        """Return the abstract rollouts for B rows."""
        return jax.tree.map(
            lambda x: sharding.rows(self.mesh, (B, *x.shape[1:]), x.dtype),
            self.row_shapes,
        )

    @functools.cached_property
    def abstract_scores(self) -> Scores:
        """Abstract scores that the host has for an iteration's rows."""
        B = self.config.rows_per_iteration
        memory = self.memory(Ledger())

        # The type is Any, because the fields of Scores are arrays, but this record holds their shapes.
        def rows(
            dtype: jax.typing.DTypeLike = jnp.float32,
            shape: tuple[int, ...] = (),
        ) -> Any:
            return sharding.rows(self.mesh, (B, *shape), dtype)

        whole: Any = {name: sharding.undivided(self.mesh, jnp.float32, shape) for name, shape in memory.whole.items()}
        return Scores(
            reward=rows(),
            trainable=rows(bool),
            question_id=rows(jnp.int32),
            parts=tuple(rows() for _ in memory.part_names),
            columns={name: rows(shape=shape) for name, shape in memory.columns.items()},
            memory=whole,
        )

    def memory(self, ledger: Ledger) -> Memory:
        """Return a new memory of earlier rewards for the method's functions."""
        config = self.config
        sizes = Sizes(
            self.model.arch.width,
            config.sampling.max_completion_tokens,
            config.environments.max_turns if config.environments.factory else 1,
            config.rollout.group_size,
        )
        parts = config.rewards.functions if config.algorithm.looks_at_parts else ()
        functions = (*config.algorithm.of_credit, *config.algorithm.of_loss)
        return Memory(functions, parts, sizes, ledger)

    @functools.cached_property
    def abstract_memory(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract arrays of ``Memory.arrays`` by the name of their part of a checkpoint."""
        arrays = self.memory(Ledger()).arrays()
        return {MEMORY + name: sharding.undivided(self.mesh, x.dtype, x.shape) for name, x in arrays.items()}

    @property
    def annotation(self) -> Annotation:
        config = self.config
        columns = self.config.algorithm.columns & {*COMPUTED_BY_LEARNER}
        # Every ring shard gets an equal share of own and external groups. Therefore no row moves between devices, and a
        # shard holds the same rows on any mesh.
        groups = (config.rollout.prompts_per_iteration, config.external.groups_per_iteration)
        num_parts = math.gcd(sharding.num_ring_shards(config, self.mesh), *groups)
        return Annotation(
            self.update,
            self.reference_model,
            config.rollout.group_size,
            num_parts,
            columns,
        )

    @property
    def abstract_columns(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract columns that ``annotate`` returns for an iteration's rows."""
        B = self.config.rows_per_iteration
        columns = {}
        for name in sorted(self.annotation.columns):
            width = self.config.row_tokens if COLUMNS[name].per_token else self.model.arch.width
            columns[name] = sharding.rows(self.mesh, (B, width), jnp.float32)
        return columns

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Abstract train state."""
        state = jax.eval_shape(self._init_state, self.params)
        layout = sharding.replicated(self.mesh, state)
        of_params = sharding.of(self.params)
        offload = self.config.optimizer.offload
        optimizer = optim.abstract_state(self.update.optimizer, self.params, self.mesh, offload=offload)
        layout = dataclasses.replace(
            layout,
            params={**layout.params, "policy": of_params},
            opt_state={**layout.opt_state, "policy": sharding.of(optimizer)},
            others=dict.fromkeys(layout.others, of_params),
        )
        return sharding.placed(state, layout)

    @functools.cached_property
    def abstract_ring(self) -> RingState:
        """Abstract ring."""
        ring = jax.eval_shape(self._init_ring)
        layout = sharding.leading(self.mesh, ring)
        if self.config.replay.memory == "host":
            layout = dataclasses.replace(layout, slots=sharding.on_host(layout.slots))
        return sharding.placed(ring, layout)

    # ---- the functions that are compiled -------------------------------------------------------------

    def _init_state(self, params: Any) -> TrainState:
        """Return the train state of a run that begins with these weights."""
        config = self.config
        learned = {"policy": params}
        if config.has_critic:
            learned["critic"] = values.new_head(self.model.arch.width, self.update.objective.bins)
        is_kept = {
            "average": config.keeps_average,
            "previous": config.keeps_previous,
            "reference": bool(config.algorithm.reference_reset_iterations),
        }
        scalars = {}
        bonus = config.algorithm.entropy_bonus
        if bonus and bonus.facts.moves:
            scalars["entropy_coefficient"] = jnp.float32(bonus["coefficient"])
        return TrainState(
            learned,
            {name: optimizer.init(learned[name]) for name, optimizer in self.update.optimizers.items()},
            jnp.zeros((), jnp.int32),
            others={name: jax.tree.map(jnp.copy, params) for name in is_kept if is_kept[name]},
            scalars=scalars,
        )

    def _init_ring(self) -> RingState:
        """Return an empty ring."""

        def experience(
            rollout: Rollout,
            scores: Scores,
            columns: dict[str, jax.Array],
        ) -> Experience:
            return credit.assign(rollout, scores, columns, self.config)[0]

        shape = jax.eval_shape(
            experience,
            self.abstract_rollout,
            self.abstract_scores,
            self.abstract_columns,
        )
        return replay.init(
            shape,
            capacity=self.config.ring_capacity,
            num_shards=sharding.num_ring_shards(self.config, self.mesh),
            on_host=self.config.replay.memory == "host",
            capacity_tokens=self.config.replay.capacity_tokens,
            page_tokens=self.config.page_tokens,
        )

    def _insert(
        self,
        ring: RingState,
        rollout: Rollout,
        scores: Scores,
        columns: dict[str, jax.Array],
        iteration: jax.Array,
    ) -> tuple[RingState, dict[str, jax.Array]]:
        """Assign credit and insert the rows into the ring. Return the ring and the sums of credit and replaced rows."""
        experience, sums = credit.assign(rollout, scores, columns, self.config)
        usage_before = replay.usage(ring)
        ring = replay.insert(
            ring,
            experience,
            iteration,
            self.config.replay,
            pass_threshold=self.config.rewards.pass_threshold,
            imitates=self.config.algorithm.imitates,
            group_size=self.config.rows_per_draw,
        )
        return ring, sums | replay.ended(usage_before, ring, num_new=experience.reward.size)

    def _update(
        self,
        state: TrainState,
        ring: RingState,
        iteration: jax.Array,
        key: jax.Array,
        base: Any = None,
    ) -> tuple[TrainState, RingState, dict[str, Any]]:
        """Take an iteration's optimizer steps. Return the state, the ring and the sums of the update by name."""
        config = self.config

        def draw(ring: RingState, key: jax.Array) -> tuple[RingState, Experience, Sums]:
            ring, batch, info = replay.draw(
                ring,
                key,
                iteration,
                config.replay,
                group_size=config.rows_per_draw,
                row_tokens=config.row_tokens,
                batch_size=config.update.batch_size,
            )
            return ring, batch, replay.sums(info)

        key_of_iteration = jax.random.fold_in(key, iteration)
        state, ring, sums = self.update.step(state, ring, iteration, key_of_iteration, draw, base)
        if config.replay.min_ess:
            effective = corrections.effective_share(
                sums.by_age["ratio_sum"],
                sums.by_age["ratio_square_sum"],
                sums.by_age["token_count"],
            )
            ring = replay.retire_stale(ring, iteration, effective, config.replay)
        rate = optim.schedule(config.optimizer, config.num_updates)(jnp.maximum(state.step - 1, 0))
        figures = {
            "by_age": sums.by_age,
            "filled_slots": replay.num_filled(ring),
            "wasted_share": replay.wasted_share(ring),
            "learning_rate": rate,
        }
        return state, ring, sums.named() | figures

    def _reset_reference(
        self,
        state: TrainState,
        ring: RingState,
    ) -> tuple[TrainState, RingState]:
        """Return the state with the policy's weights as the reference, and an empty ring.

        The old ring is discarded because its rows hold log-probs of the old reference.
        """
        del ring
        reference = jax.tree.map(jnp.copy, state.params["policy"])
        state = dataclasses.replace(state, others={**state.others, "reference": reference})
        return state, self._init_ring()

    def programs(self) -> dict[str, Program]:
        """Return every program of the learner by name."""
        sampler_mesh = sharding.sampler_mesh(self.config.mesh, self.mesh)
        return {
            **publish.programs(self.model, self.mesh, sampler_mesh),
            **self._state_programs(),
            **self._annotation_programs(),
        }

    def _state_programs(self) -> dict[str, Program]:
        """Return the programs that make and change the train state and the ring."""
        state = self.abstract_state
        ring = self.abstract_ring
        state_layout = sharding.of(state)
        ring_layout = sharding.of(ring)
        whole = sharding.replicated(self.mesh, 0)
        key = sharding.undivided(self.mesh, jax.eval_shape(lambda: rng.stream(0, "draw")).dtype)
        programs = {
            "init_state": Program(self._init_state, (self.params,), state_layout, donate=(0,)),
            "init_ring": Program(self._init_ring, (), ring_layout),
            "insert": Program(
                self._insert,
                (ring, self.abstract_rollout, self.abstract_scores, self.abstract_columns, self._abstract_number),
                (ring_layout, whole),
                donate=(0,),
            ),
            "update": Program(
                self._update,
                (state, ring, self._abstract_number, key, *self.base),
                (state_layout, ring_layout, whole),
                donate=(0, 1),
            ),
        }
        if self.config.algorithm.reference_reset_iterations:
            programs["reset_reference"] = Program(
                self._reset_reference,
                (state, ring),
                (state_layout, ring_layout),
                donate=(0, 1),
            )
        return programs

    def _annotation_programs(self) -> dict[str, Program]:
        """Return the programs that compute log-probs and other columns of rollouts."""
        annotation = self.annotation
        columns = self.abstract_columns
        rollout = self.abstract_rollout
        programs = {}
        if columns:
            programs["annotate"] = Program(
                annotation.annotate,
                (self.abstract_state, self.reference, rollout, *self.base),
                sharding.of(columns),
            )
        if self.open_rollouts is not None:
            programs["score_open"] = Program(
                annotation.score_open,
                (self.params, self._abstract_number, self.open_rollouts, *self.base),
                sharding.of(self.open_rollouts),
                donate=(2,),
            )
        if self.config.external.groups_per_iteration:
            programs["join"] = Program(
                annotation.join,
                (self.params, self._abstract_number, self.sampled, self.abstract_external, *self.base),
                sharding.of(rollout),
            )
        return programs

    @property
    def _abstract_number(self) -> jax.ShapeDtypeStruct:
        """Abstract iteration, or version of the weights."""
        return sharding.undivided(self.mesh, jnp.int32)


class Learner:
    """The learner's half of every iteration, with its state.

    Args:
        programs: static parts of the learner.
        compiled: compiled programs by name.
        ledger: record of how often each question was asked and passed.
        reference: weights of a reference that never changes; else None.
        base: frozen weights under the adapters; None without adapters.

    Attributes:
        state, ring: train state and stored rollouts. Each call donates the old arrays; do not keep them.
        memory: the method's memory of earlier rewards.
        faults: checks of the updates.
    """

    def __init__(
        self,
        programs: LearnerPrograms,
        compiled: Mapping[str, Callable[..., Any]],
        ledger: Ledger,
        *,
        reference: Any = None,
        base: Any = None,
    ):
        self.config = programs.config
        self._compiled = compiled
        self._reference = reference
        self._base = () if base is None else (base,)
        self._published_base = tuple(compiled["publish_base"](x) for x in self._base)
        self._identity = lora.identity(base, reference, self.config.model, compiled)
        shapes = programs.model.abstract_params(programs.mesh)
        self._new_adapters = functools.partial(lora.init, shapes, programs.model.lora, base, seed=self.config.seed)
        self._layout = sharding.of(programs.abstract_scores)
        self._everywhere = sharding.replicated(programs.mesh, 0)
        self._draw_key = sharding.put(rng.stream(self.config.seed, "draw"), self._everywhere)
        self.memory = programs.memory(ledger)
        self.faults = Faults(self.config, programs.mesh)
        self.state: TrainState  # set by ``start`` or ``restore``
        self.ring: RingState  # set by ``start`` or ``restore``

    def start(self, params: Any) -> None:
        """Start with these weights, which are donated, and an empty ring."""
        self.state = self._compiled["init_state"](params)
        self.ring = self._compiled["init_ring"]()
        if self.config.model.lora.path and "reference" in self.state.others:
            # The reference is the base without the loaded adapters.
            others = {**self.state.others, "reference": self._new_adapters()}
            self.state = dataclasses.replace(self.state, others=others)

    def restore(
        self,
        host_state: dict[str, Any],
        arrays: dict[str, Any],
        is_merged: bool = False,
    ) -> None:
        """Restore the values that ``host_state()`` and ``arrays()`` returned.

        Raises:
            ConfigError: the checkpoint's base or reference differs from this run's (``lora.check_frozen``).
        """
        lora.check_frozen(host_state, self._identity, self.config.model.path, is_merged)
        remembered = {name: arrays.get(MEMORY + name) for name in self.memory.arrays()}
        self.memory.restore(
            host_state["memory"],
            {name: x for name, x in remembered.items() if x is not None},
        )
        self.faults.restore(host_state["faults"])
        self.state = arrays["train"]
        self.ring = arrays["ring"]

    def arrays(self) -> dict[str, Any]:
        """Return the device arrays that ``restore`` needs, by part of the checkpoint."""
        arrays = {"train": self.state, "ring": self.ring}
        for name, x in self.memory.arrays().items():
            arrays[MEMORY + name] = sharding.put(x, self._everywhere)
        return arrays

    def host_state(self) -> dict[str, Any]:
        """Return the state on the host that ``restore`` needs in addition to ``arrays()``, as plain JSON."""
        return {
            "memory": self.memory.state(),
            "faults": self.faults.state(),
            **self._identity,
        }

    @property
    def version(self) -> jax.Array:
        """Version of the weights, [] i32: the number of optimizer steps taken."""
        return self.state.step

    @property
    def policy(self) -> Any:
        """Trainable weights of the policy. Each call of ``learn`` donates the old arrays; do not keep them."""
        return self.state.params["policy"]

    def publish(self) -> Any:
        """Return the weights in the sampler's form. Trainable weights are copied; the published base is reused."""
        return lora.join(self._compiled["publish"](self.policy, *self._base), *self._published_base)

    def learn(
        self,
        scored: ScoredRollouts,
        iteration: int,
    ) -> tuple[dict[str, Any], OpenRollouts | None]:
        """Put an iteration's rollouts into the ring and take U optimizer steps on batches drawn from the ring.

        Returns:
            Sums of credit, ring and update by name, numpy (``reports.metrics``), and "update_s", the call's seconds.
            Also the new state of ``scored.open_rollouts``, whose arrays are donated.
        """
        compiled = self._compiled
        state = self.state
        hosts.doing(f"update of iteration {iteration + 1}")
        started = time.monotonic()
        release_freed(num_bytes(self.policy))  # returns the memory of the last published copy, if that copy was freed
        rows = scored.rollout
        if scored.external is not None:
            rows = compiled["join"](self.policy, state.step, rows, scored.external, *self._base)
        scores = sharding.put(self.memory.scores(scored.rewards, scored.questions), self._layout)
        columns = {}
        if "annotate" in compiled:
            columns = compiled["annotate"](state, self._reference, rows, *self._base)
        open_rollouts = scored.open_rollouts
        if open_rollouts is not None:
            open_rollouts = compiled["score_open"](self.policy, state.step, open_rollouts, *self._base)
        now = sharding.put(np.int32(iteration), self._everywhere)
        self.ring, insert_sums = compiled["insert"](self.ring, rows, scores, columns, now)
        self.state, self.ring, update_sums = compiled["update"](state, self.ring, now, self._draw_key, *self._base)
        sums = jax.device_get(update_sums | insert_sums)
        self.memory.observe(scored.rewards, scored.questions, sums)
        self.faults.observe(sums, iteration + 1, self.ring)
        if iteration + 1 in self.config.algorithm.reference_reset_iterations:
            self.state, self.ring = compiled["reset_reference"](self.state, self.ring)
        return sums | {"update_s": time.monotonic() - started}, open_rollouts


def num_bytes(tree: Any) -> int:
    """Return the size of all arrays of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
