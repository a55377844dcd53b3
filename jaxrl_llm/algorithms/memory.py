"""What some advantages compare with: earlier rewards of a question, sums of earlier iterations. On the host.

Owns: what is remembered, and its form in a checkpoint. Does not know: how an advantage is made of it (credit).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms import baselines, shaping
from jaxrl_llm.config import Config
from jaxrl_llm.types import OUTCOME_SCORE, Rewards, Scores

# Of the decay of "mssr" (arXiv:2512.18215): iterations, and nats a token.
KL_WINDOW, KL_TARGET = 20, 0.01


class Memory:
    """What is remembered of earlier rewards, for the advantages that compare with them. On the host.

        "mssr"   of each question, Beta counts: a <- decay a + r, b <- decay b + 1 - r from a = b = 1, and the
                 baseline a / (a + b) of its next visit. It is a running mean, so rewards need not lie in [0, 1].
                 With baseline_decay_moving, decay = still + (moving - still) min(1, KL / (2 KL_TARGET)), where KL is
                 the mean of the last KL_WINDOW iterations' update/kl_behaviour_nats.
        "poise"  discounted sums of the regression from a rollout's features to its siblings' rewards.
        credit.advantage_norm_decay
                 count, mean and squared deviations of the advantages of iterations, the earlier ones faded.
        credit.short_answer_iterations
                 of each difficulty, how many correct answers were within each length of the grid since the last
                 choice, and the choice: the least length with one of them per group, else the longest.

    For the others it stays empty. What an iteration is compared with never knows its own rewards.

    Source: arXiv:2512.18215; arXiv:2605.07579; arXiv:2110.00641; LASER-D, arXiv:2505.15612. Differs: how the decay
        follows the KL is ours, and so is the start of the counts. The second's decay is fixed, where it keeps a window
        of recent rollouts. The last counts on a set kept for it; here the run's own rollouts since the last choice
        serve, and until the first any length is short.

    Args:
        hidden_size: width of the model, for "poise".
        ledger: keeps what is remembered of a question (``questions.ledger.Ledger``).
    """

    def __init__(self, config: Config, hidden_size: int, ledger: Any):
        self._config, self.ledger = config, ledger
        self._counts = ledger.numbers("mssr", (1.0, 1.0)) if config.credit.advantage == "mssr" else None  # a, b
        self._drifts: list[float] = []  # KL of the last iterations, nats a token
        features = baselines.num_features(hidden_size) if config.credit.advantage == "poise" else 0
        self._regression = np.zeros((features, features + 1))
        self._moments = np.zeros(3)
        self._correct_within = np.zeros((shaping.NUM_DIFFICULTIES, 1))
        self._short_answer = [config.sampling.max_completion_tokens] * shaping.NUM_DIFFICULTIES
        self._iterations = 0

    def scores(self, rewards: Rewards, questions: Sequence[int]) -> Scores:
        """The iteration's rewards as ``assign`` takes them, numpy.

        Args:
            rewards: of B rows, those of a question beside each other.
            questions: the question_id of each of the P groups of rows.
        """
        kind, scored = self._config.credit.advantage, rewards.outcome == OUTCOME_SCORE
        known = lambda x: np.where(scored, x, 0.0).astype(np.float32)
        parts = baseline = regression = short_answer = moments = None
        if kind == "gdpo":
            parts = np.stack([known(rewards.parts[name]) for name in self._config.rewards.functions], axis=1)
        if kind == "mssr":
            expected = [a / (a + b) for a, b in map(self._counts.of, questions)]
            baseline = np.repeat(np.float32(expected), len(scored) // len(questions))
        if kind == "poise":
            regression = self._regression.astype(np.float32)
        if self._config.credit.short_answer_iterations:
            short_answer = np.array(self._short_answer, np.int32)
        if self._config.credit.advantage_norm_decay:
            moments = self._moments.astype(np.float32)
        total = known(rewards.total)
        question = np.repeat(np.int32(questions), len(scored) // len(questions))
        return Scores(total, scored, question, parts, baseline, regression, short_answer=short_answer, moments=moments)

    def observe(self, rewards: Rewards, questions: Sequence[int], sums: dict[str, Any]) -> None:
        """Learn from an iteration: its rewards, and the sums that ``assign`` and the update returned."""
        if self._config.credit.advantage == "mssr":
            decay = self._decay(sums)
            for question, group in zip(questions, rewards.total.reshape(len(questions), -1), strict=True):
                a, b = self._counts.of(question)
                for reward in group[np.isfinite(group)].tolist():
                    a, b = decay * a + reward, decay * b + 1 - reward
                self._counts.set(question, (a, b))
        if self._config.credit.advantage == "poise":
            self._regression = self._config.credit.baseline_decay * self._regression + sums["regression"]
        if self._config.credit.advantage_norm_decay:
            self._moments = np.asarray(sums["moments"])
        if self._config.credit.short_answer_iterations:
            self._correct_within = self._correct_within + sums["correct_within"]
            self._iterations += 1
            if self._iterations % self._config.credit.short_answer_iterations == 0:
                self._choose_short_answers()

    def _decay(self, sums: dict[str, Any]) -> float:
        """Of "mssr" in this iteration."""
        still, moving = self._config.credit.baseline_decay, self._config.credit.baseline_decay_moving
        if not moving:
            return still
        drift = float(sums["kl_behaviour_sum"]) / max(float(sums["token_count"]), 1.0)
        self._drifts = [*self._drifts, drift][-KL_WINDOW:]
        return still + (moving - still) * min(1.0, sum(self._drifts) / len(self._drifts) / (2 * KL_TARGET))

    def _choose_short_answers(self) -> None:
        """A difficulty that nobody met keeps what it has."""
        grid = self._config.short_answer_grid
        for i, (*within, groups) in enumerate(self._correct_within.tolist()):
            if groups > 0:
                enough = (length for length, count in zip(grid, within, strict=True) if count >= round(groups))
                self._short_answer[i] = next(enough, grid[-1])
        self._correct_within = 0.0 * self._correct_within

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs; plain JSON."""
        return {
            "drifts": self._drifts,
            "regression": self._regression.tolist(),
            "moments": self._moments.tolist(),
            "correct_within": self._correct_within.tolist(),
            "short_answer": self._short_answer,
            "iterations": self._iterations,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._drifts = state["drifts"]
        self._regression = np.array(state["regression"])
        self._moments = np.array(state["moments"])
        self._correct_within = np.array(state["correct_within"])
        self._short_answer, self._iterations = state["short_answer"], state["iterations"]
