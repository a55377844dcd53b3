"""Conversations of the open rows with their environment: turns, replies and the ends of episodes.

    after a chunk      waiting rows and their tokens --> the text of the newest turn --> the environment
    before the next    replies of the environment --> answer tokens, and the rows that end

A turn is identified by its row and by the position of its end. Therefore a resumed run finds the answered turns and
asks the environment only for the other turns.

Owns: turns of open rows on the host, when an episode ends. Does not know: processes (environment), caches (turns).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np

from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.conversations import agents
from jaxrl_llm.conversations.environment import Environment, Reply, ids_of
from jaxrl_llm.runtime import hosts, sharding
from jaxrl_llm.scoring.rewards import CHECK_S, Answer
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, STOP_EOS, STOP_LENGTH, STOP_TURNS, Example

Row = tuple[int, int, int]  # shard, entry, sample


@dataclasses.dataclass
class Turn:
    """One turn of the policy, with the environment's reply.

    Attributes:
        text: the decoded text of the turn.
        end: number of completion tokens up to the end of the turn.
        reply: the environment's reply.
    """

    text: str
    end: int
    reply: Future[Reply]
    answer: list[int] = dataclasses.field(default_factory=list)  # token ids; empty if the episode ends here
    verdict: int = 0  # number of answer tokens, or minus the row's STOP_*; 0 = not yet known
    last: int | None = None  # last token of the turn; None if restored with a verdict

    @property
    def stop(self) -> int:
        """Return the position in the completion at which the policy's next turn begins."""
        return self.end + len(self.answer)


@dataclasses.dataclass
class Played:
    """The complete conversations of the G rows of a group.

    Attributes:
        messages: the messages of each row after the prompt.
        replies: the environment's replies to the turns of each row. A row without a complete turn has one reply. This
            reply is the start of its episode if episodes have rewards, otherwise an empty reply.
        max_turns: the limit on turns per row.
        instances: the public attributes of each row's environment instance, if a reward function asks for them.
    """

    messages: list[list[dict[str, str]]]
    replies: list[list[Future[Reply]]]
    max_turns: int
    instances: list[Future[Reply]] = dataclasses.field(default_factory=list)

    def shown(self) -> list[Any]:
        """Wait for the environment and return each row's instance attributes, or None if missing or failed."""
        return [one.result().answer for one in self.instances] or [None] * len(self.messages)

    def last_turns(self) -> list[str]:
        """Return the text of the policy's last turn of each row. Reward functions score these texts."""
        return [messages[-1]["content"] if messages[-1:] else "" for messages in self.messages]

    def by_turn(self, given: list[Any]) -> np.ndarray:
        """Return the scores by turn, [G, max_turns] f64.

        Args:
            given: one value per row. A list has a score for each turn. A number is the score of the last turn. None
                becomes NaN at the last turn.
        """
        scores = np.zeros((len(given), self.max_turns))
        for row, value, messages in zip(scores, given, self.messages, strict=True):
            turns = max(1, sum(message["role"] == "assistant" for message in messages))
            if isinstance(value, list):
                row[: len(value)] = value
            else:
                row[turns - 1] = np.nan if value is None else value
        return scores

    def own_scores(self) -> Answer:
        """Return the environment's own rewards in the form of a reward function's answer. Wait for the environment.

        A reply has the reward of the episode so far. The score of a turn is the difference to the previous reply.
        """
        given: list[Any] = []
        rows = [[reply.result() for reply in row] for row in self.replies]
        for row in rows:
            worth = [reply.reward for reply in row]
            given.append(None if None in worth else np.diff(worth, prepend=0.0).tolist())
        scores = self.by_turn(given)
        is_silent = any(reply.reward is None and reply.outcome == OUTCOME_SCORE for row in rows for reply in row)
        reasons = ["environment: an agent returned no reward"] if is_silent else []
        outcome = np.where(np.isnan(scores).any(axis=1), OUTCOME_ERROR, OUTCOME_SCORE)
        return Answer(scores, outcome, reasons)

    def failures_in(self, answer: Answer) -> Answer:
        """Return the answer of a reward function, without scores for the rows in which the environment failed."""
        scores, outcome, reasons, columns = answer
        for i, reply in enumerate(row[-1].result() for row in self.replies):
            if reply.outcome != OUTCOME_SCORE:
                scores[i], outcome[i] = np.nan, reply.outcome
                reasons = list(dict.fromkeys([*reasons, reply.reason]))
        return Answer(scores, outcome, reasons, columns)

    def columns(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return the columns among ``names`` that the environment makes (``Rewards.columns``), [G, ...] f32 each."""
        makers = {"turn_seconds": self.seconds}
        return {name: make() for name, make in makers.items() if name in names}

    def seconds(self) -> np.ndarray:
        """Return the seconds [G, max_turns] f32 that the environment took to answer each turn, or 0 without an answer.

        The call waits for the environment.
        """
        seconds = np.zeros((len(self.replies), self.max_turns), np.float32)
        for row, replies in zip(seconds, self.replies, strict=True):
            row[: len(replies)] = [reply.result().seconds for reply in replies]
        return seconds


class Conversations:
    """The conversations of one sampler's open rows on this host.

    Args:
        environment: answers turns.
        tokenizer: the model's tokenizer.
        config: sections ``environments``, ``prompts`` and ``sampling``.
    """

    def __init__(self, environment: Environment, tokenizer: Any, config: Config):
        self._environment, self._decode = environment, tokenizer.decode
        how = config.prompts.encoding
        self._encode = lambda said, last: (
            ids_of(said, tokenizer.vocab_size)
            if agents.are_tokens(said)
            else tokenizer.encode_answer(said, last, **how)
        )
        self._limits, self._most = config.environments, config.sampling.max_completion_tokens
        self._rows: dict[Row, tuple[int, list[Turn]]] = {}  # episode, turns
        self._waiting: set[Row] = set()  # after the last chunk
        self._waited_s = 0.0

    def note(self, told: tuple[jax.Array, ...], prompts: Mapping[tuple[int, int], Any]) -> list[np.ndarray]:
        """Send the newest turns of waiting rows to the environment. Each turn is sent only once.

        Args:
            told: the output of ``turns.told``.
            prompts: ``generator.OpenPrompt`` by shard and entry.

        Returns:
            Stop reasons, lengths and numbers of received answers, each [M,E,G].
        """
        *of_rows, row_MZ = jax.device_get(told[:-2])
        tokens, logps, lengths, self._waiting = *map(sharding.own_rows, told[-2:]), of_rows[1], set()
        for shard, of_slots in tokens.items():
            for slot in np.flatnonzero(row_MZ[shard] >= 0):
                entry, g = divmod(int(row_MZ[shard][slot]), lengths.shape[2])
                row, example, prompt = (shard, entry, g), prompts[shard, entry].example, prompts[shard, entry].tokens
                self._waiting.add(row)
                completion = of_slots[slot][len(prompt) : lengths[row]]
                end = len(completion)
                episode, turns = self._of(row)
                if not turns or turns[-1].end != end:
                    said = completion[turns[-1].stop if turns else 0 :]
                    text, (texts, *answered) = self._decode(said.tolist()), _so_far(turns)
                    how, begins = {}, [0, *(x.stop for x in turns)]
                    spans = list(zip(begins, [*(x.end for x in turns), end], strict=True))
                    if self._environment.is_agent:
                        how["sizes"] = [[len(prompt) + a, b - a] for a, b in spans]
                    if agents.are_tokens(example.prompt):
                        logp = logps[shard][slot][len(prompt) : lengths[row]]
                        how["drawn"] = [[completion[a:b].tolist(), logp[a:b].tolist()] for a, b in spans]
                    reply = self._environment.ask(episode, example, [*texts, text], *answered, **how)
                    turns.append(Turn(text, end, reply, last=int(completion[-1])))
        return of_rows

    def answers(self, sampler: Sampler, check: Callable[[], None]) -> tuple[jax.Array, jax.Array]:
        """Wait for the replies to the waiting rows and return them as arguments for ``turns.hear``.

        The function calls ``check`` repeatedly while it waits.

        Returns:
            Answer tokens [M,E,G,A] i32 and verdicts [M,E,G] i32.
        """
        shape = sampler.shards, sampler.entries, sampler.group_size
        tokens, verdict = np.zeros((*shape, self._limits.max_answer_tokens), np.int32), np.zeros(shape, np.int32)
        own, started = {}, time.monotonic()
        replies = [self._rows[row][1][-1].reply for row in self._waiting]
        while not all(hosts.exchange(not wait(replies, CHECK_S).not_done)):
            check()
        for row in self._waiting:
            turn = self._rows[row][1][-1]
            if not turn.verdict:
                self._judge(turn, len(self._rows[row][1]))
            own[row] = turn.verdict, turn.answer
        for said in hosts.exchange(own):  # exchanged because only one host asks for a copied row
            for row, (of_row, answer) in said.items():
                verdict[row], tokens[row][: len(answer)] = of_row, answer
        self._waited_s += time.monotonic() - started
        return sharding.put((tokens, verdict), sharding.leading(sampler.mesh, (tokens, verdict)))

    def take_waited_s(self) -> float:
        """Return the seconds that ``answers`` has waited since the last ``take_waited_s`` call.

        The seconds include the wait for other hosts' environments.
        """
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _of(self, row: Row) -> tuple[int, list[Turn]]:
        """Return the episode and the turns of a row. Begin an episode if the row has none."""
        if row not in self._rows:
            self._rows[row] = self._environment.begin(), []
        return self._rows[row]

    def _judge(self, turn: Turn, num_turns: int) -> None:
        """Set the verdict of a row's newest turn: the answer tokens, or the reason for the end of the row."""
        reply, limits = turn.reply.result(), self._limits
        if reply.answer is None:
            turn.verdict = -STOP_EOS
        elif num_turns >= limits.max_turns:
            turn.verdict = -STOP_TURNS
        else:
            most, wrong = limits.max_answer_tokens, None
            try:
                answer = self._encode(reply.answer, turn.last)
                if not 0 < len(answer) <= most:
                    wrong = f"an answer of {len(answer)} tokens; environments.max_answer_tokens={most}"
            except ConfigError as error:  # the tokenizer or the chat template rejects the answer
                wrong = str(error)
            if wrong:
                failed = {"answer": None, "outcome": OUTCOME_ERROR, "reason": f"environment: {wrong}"}
                turn.reply, turn.verdict = _there(dataclasses.replace(reply, **failed)), -STOP_EOS
            elif turn.end + len(answer) >= self._most:  # no room for another token of the policy
                turn.verdict = -STOP_LENGTH
            else:
                turn.answer, turn.verdict = answer, len(answer)

    def played(self, where: tuple[int, int], example: Example, completions: list[list[int]]) -> Played:
        """Return the conversations of a group whose rows have all stopped.

        Args:
            where: shard and entry of the group.
            example: the question.
            completions: token ids of each row's completion.
        """
        messages, replies, instances = [], [], []
        for g, completion in enumerate(completions):
            episode, turns = self._of((*where, g))
            said = []
            for turn in turns:
                said.append({"role": "assistant", "content": turn.text})
                if turn.answer:
                    answered = turn.reply.result().answer
                    is_ids = agents.are_tokens(answered)
                    said += [{"role": "user", "content": self._decode(turn.answer)}] if is_ids else answered
            if rest := completion[turns[-1].stop if turns else 0 :]:  # a truncated turn
                said.append({"role": "assistant", "content": self._decode(rest)})
            messages.append(said)
            if self._environment.is_shown:
                if turns and turns[-1].reply.result().outcome != OUTCOME_SCORE:
                    instances.append(_there(Reply(None)))
                else:
                    instances.append(self._environment.shown(episode, example, *_so_far(turns)))
            if turns:
                replies.append([turn.reply for turn in turns])
            elif self._environment.has_reward:
                replies.append([self._environment.ask(episode, example, (), ())])
            else:
                replies.append([_there(Reply(None))])
        return Played(messages, replies, self._limits.max_turns, instances)

    def forget(self, where: tuple[int, int]) -> None:
        """End the episodes of the group at this place, because the group has left the sampler."""
        for row in [row for row in self._rows if row[:2] == where]:
            self._environment.forget(self._rows.pop(row)[0])

    def state(self) -> list[Any]:
        """Return the turns with a verdict of all hosts, as plain JSON for ``restore``."""

        def saved(turn: Turn) -> list[Any]:
            reply = dataclasses.astuple(turn.reply.result())
            return [turn.text, turn.end, turn.answer, turn.verdict, list(reply)]

        own = [[*row, [saved(turn) for turn in turns if turn.verdict]] for row, (_, turns) in self._rows.items()]
        found: dict[Row, list[Any]] = {}
        for *row, turns in (row for rows in hosts.exchange(own) for row in rows):
            # Keep the longest list, because only the host that owns a row adds turns after a restore.
            found[tuple(row)] = max(found.get(tuple(row), []), turns, key=len)
        return [[*row, turns] for row, turns in sorted(found.items()) if turns]

    def restore(self, state: list[Any]) -> None:
        for *row, saved in state:
            turns = [
                Turn(*of_turn, _there(Reply(*reply)), answer, verdict) for *of_turn, answer, verdict, reply in saved
            ]
            self._rows[tuple(row)] = self._environment.begin(), turns


def _so_far(turns: list[Turn]) -> tuple[list[str], list[str | None], Any]:
    """Return an episode's turn texts, the answers and the last state, as arguments for ``Environment.ask``."""
    replies = [turn.reply.result() for turn in turns]
    return [turn.text for turn in turns], [reply.answer for reply in replies], replies[-1].state if replies else None


def _there(reply: Reply) -> Future[Reply]:
    future: Future[Reply] = Future()
    future.set_result(reply)
    return future
