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
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl_llm.actor.quotas import Place
from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.conversations import agents
from jaxrl_llm.conversations.environment import Environment, Reply, ids_of
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.runtime import hosts, sharding
from jaxrl_llm.scoring.rewards import CHECK_S, Answer
from jaxrl_llm.types import OUTCOME_ERROR, OUTCOME_SCORE, STOP_EOS, STOP_LENGTH, STOP_TURNS, Example

Row = tuple[int, int, int]  # key of a row: its shard, its entry, its sample index in the group


class Prompt(Protocol):
    """An open prompt (``generator.OpenPrompt``): its question and token ids."""

    @property
    def example(self) -> Example: ...

    @property
    def tokens(self) -> list[int]: ...


@dataclasses.dataclass
class Turn:
    """One turn of the policy, with the environment's reply.

    Attributes:
        text: the decoded text of the turn.
        end: number of completion tokens up to the end of the turn.
        reply: the environment's reply.
        answer: token ids of the reply; empty if the episode ends here.
        verdict: number of answer tokens, or minus the stop reason (``types.STOP_*``) of the row; 0 = not yet known.
        last: last token of the turn; None if the turn was restored with a verdict.
    """

    text: str
    end: int
    reply: Future[Reply]
    answer: list[int] = dataclasses.field(default_factory=list)
    verdict: int = 0
    last: int | None = None

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
        if not self.instances:
            return [None] * len(self.messages)
        return [instance.result().answer for instance in self.instances]

    def last_turns(self) -> list[str]:
        """Return the text of the policy's last turn of each row. Reward functions score these texts."""
        return [messages[-1]["content"] if messages else "" for messages in self.messages]

    def by_turn(self, values: list[Any]) -> np.ndarray:
        """Return the scores by turn, [G, max_turns] f64.

        Args:
            values: one value per row. A list has a score for each turn. A number is the score of the last turn. None
                becomes NaN at the last turn.
        """
        scores = np.zeros((len(values), self.max_turns))
        for row, value, messages in zip(scores, values, self.messages, strict=True):
            num_turns = sum(message["role"] == "assistant" for message in messages)
            last_turn = max(1, num_turns) - 1
            if isinstance(value, list):
                row[: len(value)] = value
            elif value is None:
                row[last_turn] = np.nan
            else:
                row[last_turn] = value
        return scores

    def own_scores(self) -> Answer:
        """Return the environment's own rewards in the form of a reward function's answer. Wait for the environment.

        A reply has the reward of the episode so far. The score of a turn is the difference to the previous reply.
        """
        values: list[list[float] | None] = []
        reasons: list[str] = []
        for row in self.replies:
            replies = [reply.result() for reply in row]
            rewards = [reply.reward for reply in replies if reply.reward is not None]
            if len(rewards) == len(replies):
                values.append(np.diff(rewards, prepend=0.0).tolist())
                continue
            values.append(None)
            for reply in replies:
                if reply.reward is None and reply.outcome == OUTCOME_SCORE:
                    reasons = ["environment: an agent returned no reward"]
        scores = self.by_turn(values)
        has_error = np.isnan(scores).any(axis=1)
        outcome = np.where(has_error, OUTCOME_ERROR, OUTCOME_SCORE)
        return Answer(scores, outcome, reasons)

    def failures_in(self, answer: Answer) -> Answer:
        """Return the answer of a reward function, without scores for the rows in which the environment failed."""
        scores, outcome, reasons, columns = answer
        for i, row in enumerate(self.replies):
            reply = row[-1].result()
            if reply.outcome != OUTCOME_SCORE:
                scores[i] = np.nan
                outcome[i] = reply.outcome
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

    def __init__(self, environment: Environment, tokenizer: Tokenizer, config: Config):
        self._environment = environment
        self._tokenizer = tokenizer
        self._decode = tokenizer.decode
        self._encoding = config.prompts.encoding
        self._limits = config.environments
        self._max_completion_tokens = config.sampling.max_completion_tokens
        self._rows: dict[Row, tuple[int, list[Turn]]] = {}  # the episode of each row, and its turns so far
        self._waiting: set[Row] = set()  # rows that wait for an answer since the last chunk
        self._waited_s = 0.0

    def _encode(self, answer: Any, last: int | None) -> list[int]:
        """Return the token ids of an environment's answer after a turn with the last token ``last``."""
        if agents.are_tokens(answer):
            return ids_of(answer, self._tokenizer.vocab_size)
        return self._tokenizer.encode_answer(answer, last, **self._encoding)

    # ---- turns -------------------------------------------------------------------------------------------------------

    def ask(self, flags: tuple[jax.Array, ...], prompts: Mapping[Place, Prompt]) -> list[np.ndarray]:
        """Send the newest turns of waiting rows to the environment. Each turn is sent only once.

        Args:
            flags: the output of ``turns.host_arrays``.
            prompts: the open prompts by shard and entry.

        Returns:
            Stop reasons, lengths and numbers of received answers, each [M,E,G].
        """
        reasons, lengths, answer_counts, row_MZ = jax.device_get(flags[:-2])
        all_tokens = sharding.own_rows(flags[-2])
        all_logps = sharding.own_rows(flags[-1])
        group_size = lengths.shape[2]
        self._waiting = set()
        for shard, tokens in all_tokens.items():
            logps = all_logps[shard]
            for slot in np.flatnonzero(row_MZ[shard] >= 0):
                entry, g = divmod(int(row_MZ[shard][slot]), group_size)
                row = shard, entry, g
                self._waiting.add(row)
                prompt = prompts[shard, entry]
                completion = slice(len(prompt.tokens), lengths[row])
                self._ask(row, prompt, tokens[slot][completion], logps[slot][completion])
        return [reasons, lengths, answer_counts]

    def _ask(self, row: Row, prompt: Prompt, completion: np.ndarray, logps: np.ndarray) -> None:
        """Send the newest turn of a row to the environment, unless the turn was already sent.

        Args:
            completion: token ids of the row's completion so far.
            logps: log-probs of these tokens.
        """
        end = len(completion)
        episode, turns = self._episode(row)
        if turns and turns[-1].end == end:
            return
        texts, answers, state = _so_far(turns)
        begin = turns[-1].stop if turns else 0
        text = self._decode(completion[begin:].tolist())
        for_agents = self._for_agents(prompt, turns, completion, logps)
        reply = self._environment.ask(episode, prompt.example, [*texts, text], answers, state, **for_agents)
        last_token = int(completion[-1])
        turns.append(Turn(text, end, reply, last=last_token))

    def _for_agents(
        self, prompt: Prompt, turns: list[Turn], completion: np.ndarray, logps: np.ndarray
    ) -> dict[str, Any]:
        """Return the arguments of ``Environment.ask`` that only agents need.

        "sizes" has the numbers of prompt tokens and of completion tokens of every turn. "drawn" has the token ids and
        the log-probs of every turn; only agents with token prompts receive this argument.
        """
        begins = [0, *(turn.stop for turn in turns)]
        ends = [*(turn.end for turn in turns), len(completion)]
        spans = list(zip(begins, ends, strict=True))
        arguments: dict[str, Any] = {}
        if self._environment.is_agent:
            prompt_size = len(prompt.tokens)
            arguments["sizes"] = [[prompt_size + begin, end - begin] for begin, end in spans]
        if agents.are_tokens(prompt.example.prompt):
            drawn = []
            for begin, end in spans:
                drawn.append([completion[begin:end].tolist(), logps[begin:end].tolist()])
            arguments["drawn"] = drawn
        return arguments

    def answers(self, sampler: Sampler, check: Callable[[], None]) -> tuple[jax.Array, jax.Array]:
        """Wait for the replies to the waiting rows and return them as arguments for ``turns.append_answers``.

        The function calls ``check`` repeatedly while it waits.

        Returns:
            Answer tokens [M,E,G,A] i32 and verdicts [M,E,G] i32.
        """
        started = time.monotonic()
        replies = []
        for row in self._waiting:
            _, turns = self._rows[row]
            replies.append(turns[-1].reply)
        while True:
            has_all = not wait(replies, CHECK_S).not_done
            if all(hosts.exchange(has_all)):
                break
            check()
        own_answers = {}
        for row in self._waiting:
            _, turns = self._rows[row]
            turn = turns[-1]
            if not turn.verdict:
                self._judge(turn, len(turns))
            own_answers[row] = turn.verdict, turn.answer
        shape = sampler.shards, sampler.entries, sampler.group_size
        tokens = np.zeros((*shape, self._limits.max_answer_tokens), np.int32)
        verdicts = np.zeros(shape, np.int32)
        # If several hosts hold a row, only one host asks the environment for it.
        for host_answers in hosts.exchange(own_answers):
            for row, (verdict, answer) in host_answers.items():
                verdicts[row] = verdict
                tokens[row][: len(answer)] = answer
        self._waited_s += time.monotonic() - started
        arrays = (tokens, verdicts)
        return sharding.put(arrays, sharding.leading(sampler.mesh, arrays))

    def take_waited_s(self) -> float:
        """Return the seconds that ``answers`` has waited since the last ``take_waited_s`` call.

        The seconds include the wait for other hosts' environments.
        """
        waited_s = self._waited_s
        self._waited_s = 0.0
        return waited_s

    def _episode(self, row: Row) -> tuple[int, list[Turn]]:
        """Return the episode and the turns of a row. Begin an episode if the row does not have one."""
        if row not in self._rows:
            self._rows[row] = self._environment.begin(), []
        return self._rows[row]

    def _judge(self, turn: Turn, num_turns: int) -> None:
        """Set the verdict of a row's newest turn: the answer tokens, or the reason for the end of the row."""
        reply = turn.reply.result()
        if reply.answer is None:
            turn.verdict = -STOP_EOS
            return
        if num_turns >= self._limits.max_turns:
            turn.verdict = -STOP_TURNS
            return
        answer: list[int] = []
        error = None
        limit = self._limits.max_answer_tokens
        try:
            answer = self._encode(reply.answer, turn.last)
            if not 0 < len(answer) <= limit:
                error = f"an answer of {len(answer)} tokens; environments.max_answer_tokens={limit}"
        except ConfigError as rejection:  # the tokenizer or the chat template rejects the answer
            error = str(rejection)
        if error is not None:
            failed = dataclasses.replace(
                reply,
                answer=None,
                outcome=OUTCOME_ERROR,
                reason=f"environment: {error}",
            )
            turn.reply = _finished(failed)
            turn.verdict = -STOP_EOS
        elif turn.end + len(answer) >= self._max_completion_tokens:  # the policy has no room for another token
            turn.verdict = -STOP_LENGTH
        else:
            turn.answer = answer
            turn.verdict = len(answer)

    # ---- finished groups ---------------------------------------------------------------------------------------------

    def played(self, place: Place, example: Example, completions: list[list[int]]) -> Played:
        """Return the conversations of a group whose rows have all stopped.

        Args:
            place: shard and entry of the group.
            example: the question.
            completions: token ids of each row's completion.
        """
        messages = []
        replies = []
        instances = []
        for g, completion in enumerate(completions):
            episode, turns = self._episode((*place, g))
            messages.append(self._messages(turns, completion))
            if self._environment.is_shown:
                instances.append(self._instance(episode, example, turns))
            if turns:
                replies.append([turn.reply for turn in turns])
            elif self._environment.has_reward:
                replies.append([self._environment.ask(episode, example, (), ())])
            else:
                replies.append([_finished(Reply(None))])
        return Played(messages, replies, self._limits.max_turns, instances)

    def _messages(self, turns: list[Turn], completion: list[int]) -> list[dict[str, str]]:
        """Return the messages of a row after its prompt."""
        messages: list[dict[str, str]] = []
        for turn in turns:
            messages.append({"role": "assistant", "content": turn.text})
            if not turn.answer:
                continue
            answer = turn.reply.result().answer
            if agents.are_tokens(answer):
                messages.append({"role": "user", "content": self._decode(turn.answer)})
            else:
                messages += answer
        begin = turns[-1].stop if turns else 0
        truncated_turn = completion[begin:]
        if truncated_turn:
            messages.append({"role": "assistant", "content": self._decode(truncated_turn)})
        return messages

    def _instance(self, episode: int, example: Example, turns: list[Turn]) -> Future[Reply]:
        """Return the public attributes of a row's environment instance, None if the environment failed."""
        if turns and turns[-1].reply.result().outcome != OUTCOME_SCORE:
            return _finished(Reply(None))
        return self._environment.shown(episode, example, *_so_far(turns))

    def forget(self, place: Place) -> None:
        """End the episodes of the group at this place, because the group has left the sampler."""
        rows = [row for row in self._rows if row[:2] == place]
        for row in rows:
            episode, _ = self._rows.pop(row)
            self._environment.forget(episode)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> list[Any]:
        """Return the turns with a verdict of all hosts, as plain JSON for ``restore``."""
        own_rows = []
        for row, (_, turns) in self._rows.items():
            saved_turns = [_saved(turn) for turn in turns if turn.verdict]
            own_rows.append((row, saved_turns))
        longest: dict[Row, list[Any]] = {}
        for host_rows in hosts.exchange(own_rows):
            for row, turns in host_rows:
                # Keep the longest list, because only the host that owns a row adds turns after a restore.
                if len(turns) > len(longest.get(row, [])):
                    longest[row] = turns
        return [[*row, turns] for row, turns in sorted(longest.items())]

    def restore(self, state: list[Any]) -> None:
        """Restore the turns that ``state`` returned."""
        for shard, entry, g, saved_turns in state:
            turns = []
            for text, end, answer, verdict, saved_reply in saved_turns:
                reply = _finished(Reply(*saved_reply))
                turns.append(Turn(text, end, reply, answer, verdict))
            self._rows[shard, entry, g] = self._environment.begin(), turns


def _saved(turn: Turn) -> list[Any]:
    """Return a turn with a verdict as plain JSON."""
    reply = dataclasses.astuple(turn.reply.result())
    return [turn.text, turn.end, turn.answer, turn.verdict, list(reply)]


def _so_far(turns: list[Turn]) -> tuple[list[str], list[Any], Any]:
    """Return an episode's turn texts, the answers and the last state, as arguments for ``Environment.ask``."""
    replies = [turn.reply.result() for turn in turns]
    texts = [turn.text for turn in turns]
    answers = [reply.answer for reply in replies]
    state = replies[-1].state if replies else None
    return texts, answers, state


def _finished(reply: Reply) -> Future[Reply]:
    """Return a future that has this result."""
    future: Future[Reply] = Future()
    future.set_result(reply)
    return future
