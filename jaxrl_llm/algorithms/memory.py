"""Memories of methods: what an advantage or a reward term compares with that came before this iteration, on the host.

Each is a class with

    columns, whole                      names of what rows are given, [B] f32, and of arrays beside them: name -> shape
    known(rewards, questions)           these for an iteration, numpy
    observe(rewards, questions, sums)   learn from the iteration: its rewards, what functions and the update returned
    state(), restore(state)             its form in a checkpoint: plain JSON, or one array of float32 if it is large

What an iteration is compared with never knows its own rewards. What is remembered of a question lies in the ledger.

Owns: what is remembered of earlier iterations. Does not know: how an advantage is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.baselines import num_features
from jaxrl_llm.algorithms.facts import CreditFacts
from jaxrl_llm.algorithms.inputs import NUM_DIFFICULTIES, Sizes, reward_columns
from jaxrl_llm.types import OUTCOME_SCORE, Rewards, Scores

# Of the decay of "mssr" (arXiv:2512.18215): iterations, and nats a token.
KL_WINDOW, KL_TARGET = 20, 0.01


class Moments:
    """Count, mean and squared deviations of the advantages of iterations, the earlier ones faded: for ``norm_decay``.

    Source: arXiv:2110.00641.
    """

    columns = ()

    def __init__(self, settings: Mapping[str, Any], sizes: Sizes, ledger: Any):
        self.whole = {"moments": (3,)} if settings["norm_decay"] else {}
        self._moments = np.zeros(3)

    def known(self, rewards: Rewards, questions: Sequence[int]) -> dict[str, np.ndarray]:
        return {"moments": self._moments.astype(np.float32)} if self.whole else {}

    def observe(self, rewards: Rewards, questions: Sequence[int], sums: Mapping[str, Any]) -> None:
        if self.whole:
            self._moments = np.asarray(sums["moments"])

    def state(self) -> Any:
        return self._moments.tolist()

    def restore(self, state: Any) -> None:
        self._moments = np.array(state)


class Regression:
    """Decayed sums of the regression from a rollout's features to its siblings' rewards, for "poise".

    The sums are float32, like the sums that each iteration adds. A checkpoint stores the same bits.

    Source: arXiv:2605.07579. Differs: a fixed decay, where it keeps a window of recent rollouts.
    """

    columns = ()

    def __init__(self, settings: Mapping[str, Any], sizes: Sizes, ledger: Any):
        features = num_features(sizes.width)
        self.whole = {"regression": (features, features + 1)}
        self._decay = np.float32(settings["decay"])
        self._sums = np.zeros((features, features + 1), np.float32)

    def known(self, rewards: Rewards, questions: Sequence[int]) -> dict[str, np.ndarray]:
        return {"regression": self._sums}

    def observe(self, rewards: Rewards, questions: Sequence[int], sums: Mapping[str, Any]) -> None:
        self._sums = self._decay * self._sums + np.asarray(sums["regression"], np.float32)

    def state(self) -> np.ndarray:
        return self._sums

    def restore(self, state: Any) -> None:
        self._sums = np.array(state, np.float32)  # a list, in checkpoints of earlier versions


class QuestionMean(Moments):
    """Of each question, Beta counts of its rewards, and the mean they give its next visit; for "mssr".

        a <- decay a + r,   b <- decay b + 1 - r   from a = b = 1,   mean = a / (a + b)

    It is a running mean, so rewards need not lie in [0, 1]. The reward r has what reward terms add: the advantage
    returns it as "shaped_reward" [B]. With ``decay_moving`` above 0 the decay is still + (moving - still) min(1, KL /
    (2 KL_TARGET)), KL the mean of the last KL_WINDOW iterations' update/kl_behaviour_nats.

    Source: arXiv:2512.18215. Differs: how the decay follows the KL is ours, and so is the start of the counts.
    """

    columns = ("question_mean",)

    def __init__(self, settings: Mapping[str, Any], sizes: Sizes, ledger: Any):
        super().__init__(settings, sizes, ledger)
        self._still, self._moving = settings["decay"], settings["decay_moving"]
        self._drifts: list[float] = []  # KL of the last iterations, nats a token
        self._counts = ledger.numbers("mssr")

    def _count(self, question: int) -> tuple[float, ...]:
        return self._counts.get(question, (1.0, 1.0))

    def known(self, rewards: Rewards, questions: Sequence[int]) -> dict[str, np.ndarray]:
        mean = [a / (a + b) for a, b in map(self._count, questions)]
        repeated = np.repeat(np.float32(mean), len(rewards.outcome) // len(questions))
        return super().known(rewards, questions) | {"question_mean": repeated}

    def observe(self, rewards: Rewards, questions: Sequence[int], sums: Mapping[str, Any]) -> None:
        super().observe(rewards, questions, sums)
        decay = self._still
        if self._moving:
            tokens = float(sums["token_count"])
            if tokens and np.isfinite(drift := float(sums["kl_behaviour_sum"]) / tokens):  # else it would decide alone
                self._drifts = [*self._drifts, drift][-KL_WINDOW:]
            share = min(1.0, sum(self._drifts) / max(1, len(self._drifts)) / (2 * KL_TARGET))
            decay = self._still + (self._moving - self._still) * share
        shaped = np.asarray(sums.get("shaped_reward", rewards.total))
        shaped = np.where(np.isfinite(rewards.total), shaped, np.nan)
        for question, group in zip(questions, shaped.reshape(len(questions), -1), strict=True):
            a, b = self._count(question)
            for reward in group[np.isfinite(group)].tolist():
                a, b = decay * a + reward, decay * b + 1 - reward
            self._counts[question] = a, b

    def state(self) -> Any:
        return [super().state(), self._drifts]

    def restore(self, state: Any) -> None:
        moments, self._drifts = state
        super().restore(moments)


def length_grid(step: int, longest: int) -> tuple[int, ...]:
    """Lengths among which a short answer's is chosen; the last is any length."""
    return (*range(step, longest, step), longest)


class ShortAnswers:
    """Of each difficulty, how many answers were within each length of the grid, and the length chosen by it.

    See ``shaping.short_answer``; chosen anew every so many iterations, where a difficulty that nobody met keeps what it
    has.

    Source: LASER-D, arXiv:2505.15612 (released code). Differs: it counts on a set kept for it; here the run's own
        rollouts since the last choice serve, and until the first any length is short.
    """

    columns = ()

    def __init__(self, settings: Mapping[str, Any], sizes: Sizes, ledger: Any):
        self._every = settings["every_iterations"]
        self.whole = {"short_answer": (NUM_DIFFICULTIES,)} if self._every else {}
        self._grid = length_grid(settings["tokens"], sizes.max_length)
        self._at_least_right = 2 * sizes.group_size // 3, sizes.group_size // 3, 1  # easy, middling, hard
        self._within = np.zeros((NUM_DIFFICULTIES, 1))
        self._chosen, self._iterations = [sizes.max_length] * NUM_DIFFICULTIES, 0

    def known(self, rewards: Rewards, questions: Sequence[int]) -> dict[str, np.ndarray]:
        return {"short_answer": np.array(self._chosen, np.float32)} if self._every else {}

    def observe(self, rewards: Rewards, questions: Sequence[int], sums: Mapping[str, Any]) -> None:
        if not self._every:
            return
        self._within = self._within + sums["answers_within"]
        self._iterations += 1
        if self._iterations % self._every:
            return
        for i, (*within, answers) in enumerate(self._within.tolist()):
            if answers > 0:
                right, grid = self._at_least_right[i], zip(self._grid, within, strict=True)
                self._chosen[i] = next((n for n, count in grid if count * right >= answers), self._grid[-1])
        self._within = 0.0 * self._within

    def state(self) -> Any:
        return [self._grid, self._within.tolist(), self._chosen, self._iterations]

    def restore(self, state: Any) -> None:
        grid, within, chosen, iterations = state
        if tuple(grid) == self._grid:  # else another's, where a change was allowed
            self._within, self._chosen, self._iterations = np.array(within), chosen, iterations


class Memory:
    """What the functions of a method remember, together. On the host.

    Args:
        functions: the method's functions (``AlgorithmConfig.of_credit`` and ``of_loss``), for their memories and
            the columns that they need.
        part_names: reward functions whose scores are looked at one by one; () where their sum counts.
        ledger: keeps what is remembered of a question (``questions.ledger.Ledger``).
    """

    def __init__(self, functions: Sequence[Any], part_names: Sequence[str], sizes: Sizes, ledger: Any):
        self.ledger, self.part_names = ledger, part_names
        remembering = [one for one in functions if isinstance(one.facts, CreditFacts) and one.facts.memory]
        self._memories = {one.name: one.facts.memory(one.settings, sizes, ledger) for one in remembering}
        needed = frozenset().union(*(one.facts.columns for one in functions))
        self._reward_columns = reward_columns(needed, max_turns=sizes.max_turns, max_length=sizes.max_length)

    @property
    def columns(self) -> dict[str, tuple[int, ...]]:
        """Names of ``Scores.columns``, and what shape each has of a row."""
        known = {name: () for memory in self._memories.values() for name in memory.columns}
        return known | self._reward_columns

    @property
    def whole(self) -> dict[str, tuple[int, ...]]:
        """Shapes of ``Scores.memory``."""
        return {name: shape for memory in self._memories.values() for name, shape in memory.whole.items()}

    def scores(self, rewards: Rewards, questions: Sequence[int]) -> Scores:
        """The iteration's rewards as ``credit.assign`` takes them, numpy.

        Args:
            rewards: of B rows, those of a question beside each other.
            questions: the question_id of each of the P groups of rows.
        """
        scored = rewards.outcome == OUTCOME_SCORE
        known = lambda x: np.where(scored.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0).astype(np.float32)
        said = {name: x for memory in self._memories.values() for name, x in memory.known(rewards, questions).items()}
        given = {"turn_reward": rewards.total[:, None], **rewards.columns}  # a completion of one turn has it all there
        for name, shape in self._reward_columns.items():
            said[name] = known(given[name] if name in given else np.zeros((len(scored), *shape)))
        return Scores(
            known(rewards.total),
            scored,
            np.repeat(np.int32(questions), len(scored) // len(questions)),
            parts=tuple(known(rewards.parts[name]) for name in self.part_names),
            columns={name: said[name] for name in self.columns},
            memory={name: said[name] for name in self.whole},
        )

    def observe(self, rewards: Rewards, questions: Sequence[int], sums: Mapping[str, Any]) -> None:
        """Learn from an iteration: its rewards, and the sums that ``credit.assign`` and the update returned."""
        for memory in self._memories.values():
            memory.observe(rewards, questions, sums)

    def state(self) -> dict[str, Any]:
        """Return the memories that are plain JSON, by method."""
        return {name: state for name, state in self._states().items() if not isinstance(state, np.ndarray)}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the memories that are arrays, by method: their JSON would take megabytes."""
        return {name: state for name, state in self._states().items() if isinstance(state, np.ndarray)}

    def _states(self) -> dict[str, Any]:
        return {name: memory.state() for name, memory in self._memories.items()}

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Restore what ``state()`` and ``arrays()`` returned.

        A memory that neither of them has begins empty, and the memory of a method that this one does not use is
        ignored: both happen if a run was allowed to change its method.
        """
        saved = {**state, **arrays}
        for name in self._memories.keys() & saved.keys():
            self._memories[name].restore(saved[name])
