"""Memories of a method: statistics of earlier iterations for its advantage and its reward terms, on the host.

Each memory is a class (``facts.MethodMemory``) with

    columns, whole                      names of columns [B] f32 of rows, and shapes of other arrays by name
    values(rewards, questions)          these columns and arrays for an iteration, numpy
    observe(rewards, questions, sums)   learn from an iteration: its rewards, and the sums that functions and the update
                                        returned
    state(), restore(state)             its form in a checkpoint: plain JSON, or one array of float32 if it is large

An iteration is compared with earlier iterations only, never with its own rewards. The ledger stores the
memory of each question.

Owns: the memories of earlier iterations. Does not know: how an advantage uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.baselines import num_features
from jaxrl_llm.algorithms.facts import CreditFacts, MethodMemory
from jaxrl_llm.algorithms.inputs import NUM_DIFFICULTIES, Sizes, reward_columns
from jaxrl_llm.settings.use import Chosen
from jaxrl_llm.types import OUTCOME_SCORE, Rewards, Scores

# For the decay of "mssr" (arXiv:2512.18215): number of iterations in the window, and target KL in nats per token.
KL_WINDOW = 20
KL_TARGET = 0.01

# The ledger of questions, ``questions.ledger.Ledger``, which stands above this folder.
Ledger = Any


class Moments:
    """Count, mean and squared deviations of the advantages of earlier iterations, with decay: for ``norm_decay``.

    Source: arXiv:2110.00641.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, settings: Mapping[str, Any], sizes: Sizes, ledger: Ledger):
        self.whole: dict[str, tuple[int, ...]] = {}
        if settings["norm_decay"]:
            self.whole = {"moments": (3,)}
        self._moments = np.zeros(3)

    def values(self, rewards: Rewards, questions: Sequence[int]) -> dict[str, np.ndarray]:
        if not self.whole:
            return {}
        return {"moments": self._moments.astype(np.float32)}

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

    Source: arXiv:2605.07579. Differs: old sums decay; the source keeps a window of recent rollouts.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, settings: Mapping[str, Any], sizes: Sizes, ledger: Ledger):
        features = num_features(sizes.width)
        self.whole: dict[str, tuple[int, ...]] = {"regression": (features, features + 1)}
        self._decay = np.float32(settings["decay"])
        self._sums = np.zeros((features, features + 1), np.float32)

    def values(self, rewards: Rewards, questions: Sequence[int]) -> dict[str, np.ndarray]:
        return {"regression": self._sums}

    def observe(self, rewards: Rewards, questions: Sequence[int], sums: Mapping[str, Any]) -> None:
        self._sums = self._decay * self._sums + np.asarray(sums["regression"], np.float32)

    def state(self) -> np.ndarray:
        return self._sums

    def restore(self, state: Any) -> None:
        self._sums = np.array(state, np.float32)  # a list, in checkpoints of earlier versions


class QuestionMean(Moments):
    """Beta counts of the rewards of each question, and their mean for the question's next visit; for "mssr".

        a <- decay a + r,   b <- decay b + 1 - r   from a = b = 1,   mean = a / (a + b)

    Rewards may lie outside [0, 1], because the mean is not used as a probability. The reward r includes reward terms:
    the advantage returns it as "shaped_reward" [B]. With ``decay_moving`` above 0 the decay is still + (moving - still)
    min(1, KL / (2 KL_TARGET)), where KL is the mean of the last KL_WINDOW iterations' update/kl_behaviour_nats.

    Source: arXiv:2512.18215. Differs: this package chose how the decay follows the KL, and the initial counts.
    """

    columns = ("question_mean",)

    def __init__(self, settings: Mapping[str, Any], sizes: Sizes, ledger: Ledger):
        super().__init__(settings, sizes, ledger)
        self._still = settings["decay"]
        self._moving = settings["decay_moving"]
        self._drifts: list[float] = []  # KL of the last iterations, nats per token
        self._counts = ledger.numbers("mssr")

    def _count(self, question: int) -> tuple[float, ...]:
        return self._counts.get(question, (1.0, 1.0))

    def values(self, rewards: Rewards, questions: Sequence[int]) -> dict[str, np.ndarray]:
        means = []
        for question in questions:
            a, b = self._count(question)
            means.append(a / (a + b))
        group_size = len(rewards.outcome) // len(questions)
        mean_of_rows = np.repeat(np.array(means, np.float32), group_size)
        return super().values(rewards, questions) | {"question_mean": mean_of_rows}

    def observe(self, rewards: Rewards, questions: Sequence[int], sums: Mapping[str, Any]) -> None:
        super().observe(rewards, questions, sums)
        decay = self._next_decay(sums)
        shaped = np.asarray(sums.get("shaped_reward", rewards.total))
        shaped_or_nan = np.where(np.isfinite(rewards.total), shaped, np.nan)
        by_question = shaped_or_nan.reshape(len(questions), -1)
        for question, group in zip(questions, by_question, strict=True):
            a, b = self._count(question)
            finite_rewards = group[np.isfinite(group)]
            for reward in finite_rewards.tolist():
                a = decay * a + reward
                b = decay * b + 1 - reward
            self._counts[question] = (a, b)

    def _next_decay(self, sums: Mapping[str, Any]) -> float:
        """Record the KL of an iteration, and return the decay of its rewards."""
        if not self._moving:
            return self._still
        tokens = float(sums["token_count"])
        if tokens:
            drift = float(sums["kl_behaviour_sum"]) / tokens
            if np.isfinite(drift):  # one infinite KL would dominate the mean of the window
                self._drifts = [*self._drifts, drift][-KL_WINDOW:]
        mean_drift = sum(self._drifts) / max(1, len(self._drifts))
        share = min(1.0, mean_drift / (2 * KL_TARGET))
        return self._still + (self._moving - self._still) * share

    def state(self) -> Any:
        return [super().state(), self._drifts]

    def restore(self, state: Any) -> None:
        moments, self._drifts = state
        super().restore(moments)


def length_grid(step: int, longest: int) -> tuple[int, ...]:
    """Return the lengths among which the length of a short answer is chosen. The last one allows every length."""
    return (*range(step, longest, step), longest)


class ShortAnswers:
    """Counts of answers within each length of the grid, and the chosen length, for each class of difficulty.

    See ``shaping.short_answer``. The lengths are chosen anew at fixed intervals. A class without answers keeps its
    length.

    Source: LASER-D, arXiv:2505.15612 (released code). Differs: the source counts on a separate set of questions. Here
        the run's own rollouts since the last choice are counted, and every length is short until the first choice.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, settings: Mapping[str, Any], sizes: Sizes, ledger: Ledger):
        self._every = settings["every_iterations"]
        self.whole: dict[str, tuple[int, ...]] = {}
        if self._every:
            self.whole = {"short_answer": (NUM_DIFFICULTIES,)}
        self._grid = length_grid(settings["tokens"], sizes.max_length)
        # Smallest number of correct answers to a question in each class: easy, medium, hard.
        self._min_correct = (2 * sizes.group_size // 3, sizes.group_size // 3, 1)
        self._within = np.zeros((NUM_DIFFICULTIES, 1))
        self._chosen = [sizes.max_length] * NUM_DIFFICULTIES
        self._iterations = 0

    def values(self, rewards: Rewards, questions: Sequence[int]) -> dict[str, np.ndarray]:
        if not self._every:
            return {}
        return {"short_answer": np.array(self._chosen, np.float32)}

    def observe(self, rewards: Rewards, questions: Sequence[int], sums: Mapping[str, Any]) -> None:
        if not self._every:
            return
        self._within = self._within + sums["answers_within"]
        self._iterations += 1
        if self._iterations % self._every:
            return
        for difficulty, counts in enumerate(self._within.tolist()):
            *within, num_answers = counts
            if num_answers > 0:
                min_correct = self._min_correct[difficulty]
                self._chosen[difficulty] = self._choose(within, num_answers, min_correct)
        self._within = np.zeros_like(self._within)

    def _choose(self, within: Sequence[float], num_answers: float, min_correct: int) -> int:
        """Return the smallest length of the grid that enough answers do not exceed, or the largest length."""
        for length, count in zip(self._grid, within, strict=True):
            if count * min_correct >= num_answers:
                return length
        return self._grid[-1]

    def state(self) -> Any:
        return [self._grid, self._within.tolist(), self._chosen, self._iterations]

    def restore(self, state: Any) -> None:
        grid, within, chosen, iterations = state
        if tuple(grid) != self._grid:  # if the run changed its settings, the counts begin anew
            return
        self._within = np.array(within)
        self._chosen = chosen
        self._iterations = iterations


def _scored_only(values: np.ndarray, is_scored: np.ndarray) -> np.ndarray:
    """Return the values [B, ...] as float32, 0.0 for rows without a score."""
    num_other_dims = values.ndim - 1
    mask = is_scored.reshape(-1, *[1] * num_other_dims)
    return np.where(mask, values, 0.0).astype(np.float32)


class Memory:
    """The memories of all functions of a method, on the host.

    Args:
        functions: the method's functions (``AlgorithmConfig.of_credit`` and ``of_loss``), for their memories and
            the columns that they need.
        part_names: reward functions whose scores the advantage compares separately; () if only their sum counts.
        ledger: stores the memory of each question (``questions.ledger.Ledger``).
    """

    def __init__(
        self,
        functions: Sequence[Chosen[Any]],
        part_names: Sequence[str],
        sizes: Sizes,
        ledger: Ledger,
    ):
        self.ledger = ledger
        self.part_names = part_names
        self._memories: dict[str, MethodMemory] = {}
        needed: set[str] = set()
        for chosen in functions:
            facts = chosen.facts
            if isinstance(facts, CreditFacts) and facts.memory is not None:
                self._memories[chosen.name] = facts.memory(chosen.settings, sizes, ledger)
            needed |= facts.columns
        self._reward_columns = reward_columns(needed, max_turns=sizes.max_turns, max_length=sizes.max_length)

    @property
    def columns(self) -> dict[str, tuple[int, ...]]:
        """Names of ``Scores.columns``, and the shape of each for one row."""
        columns: dict[str, tuple[int, ...]] = {}
        for memory in self._memories.values():
            for name in memory.columns:
                columns[name] = ()
        return columns | self._reward_columns

    @property
    def whole(self) -> dict[str, tuple[int, ...]]:
        """Shapes of ``Scores.memory``."""
        shapes: dict[str, tuple[int, ...]] = {}
        for memory in self._memories.values():
            shapes |= memory.whole
        return shapes

    def scores(self, rewards: Rewards, questions: Sequence[int]) -> Scores:
        """Return the iteration's rewards as ``credit.assign`` receives them, in numpy.

        Args:
            rewards: of B rows. The rows of a question are neighbours.
            questions: the question_id of each of the P groups of rows.
        """
        is_scored = rewards.outcome == OUTCOME_SCORE
        group_size = len(is_scored) // len(questions)
        values: dict[str, np.ndarray] = {}
        for memory in self._memories.values():
            values |= memory.values(rewards, questions)
        values |= self._column_values(rewards)
        # The fields of ``Scores`` are arrays of the device once the caller has put them there.
        parts: Any = tuple(_scored_only(rewards.parts[name], is_scored) for name in self.part_names)
        reward: Any = _scored_only(rewards.total, is_scored)
        question_id: Any = np.repeat(np.array(questions, np.int32), group_size)
        columns: Any = {name: values[name] for name in self.columns}
        memory_arrays: Any = {name: values[name] for name in self.whole}
        return Scores(
            reward,
            is_scored,
            question_id,
            parts=parts,
            columns=columns,
            memory=memory_arrays,
        )

    def _column_values(self, rewards: Rewards) -> dict[str, np.ndarray]:
        """Return the columns that are made with the rewards; zeros if no reward function gives a column."""
        is_scored = rewards.outcome == OUTCOME_SCORE
        # The only turn of a completion receives the whole reward.
        reward_values = {"turn_reward": rewards.total[:, None], **rewards.columns}
        values: dict[str, np.ndarray] = {}
        for name, row_shape in self._reward_columns.items():
            if name in reward_values:
                values[name] = _scored_only(reward_values[name], is_scored)
            else:
                values[name] = np.zeros((len(is_scored), *row_shape), np.float32)
        return values

    def observe(self, rewards: Rewards, questions: Sequence[int], sums: Mapping[str, Any]) -> None:
        """Learn from an iteration: its rewards, and the sums that ``credit.assign`` and the update returned."""
        for memory in self._memories.values():
            memory.observe(rewards, questions, sums)

    def state(self) -> dict[str, Any]:
        """Return the memories that are plain JSON, by method."""
        states = self._states()
        return {name: state for name, state in states.items() if not isinstance(state, np.ndarray)}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the memories that are arrays, by method: their JSON would take megabytes."""
        states = self._states()
        return {name: state for name, state in states.items() if isinstance(state, np.ndarray)}

    def _states(self) -> dict[str, Any]:
        return {name: memory.state() for name, memory in self._memories.items()}

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Restore the results of ``state()`` and ``arrays()``.

        A run may change its method between checkpoints. A memory that the checkpoint does not have begins empty. A
        saved memory that the new method does not use is ignored.
        """
        saved = {**state, **arrays}
        for name in self._memories.keys() & saved.keys():
            self._memories[name].restore(saved[name])
