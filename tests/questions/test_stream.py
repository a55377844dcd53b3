"""Properties of the prompt stream and of its tasks."""

import collections
import dataclasses
import datetime
import decimal
import gzip
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from support.building import needs_reasoning_gym
from support.refusal import ANY, check_refusal, check_row, raises_with, refused, refused_row

from jaxrl_llm.actor import evaluation
from jaxrl_llm.config import Config, ConfigError, EnvironmentsConfig, EvalConfig, PromptsConfig, freeze
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.questions import tasks
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.questions.stream import EncodedExample, PromptStream, batch_of, encode_examples, split_held_out
from jaxrl_llm.questions.tasks import letters
from jaxrl_llm.scoring import reward_worker
from jaxrl_llm.types import Example


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes. Its template puts "<system>" before a text and ">" after it."""

    def encode_prompts(self, prompts, *, chat_template, system_prompt, special_tokens, chat_template_kwargs):
        texts = [p if isinstance(p, str) else "|".join(m["content"] for m in p) for p in prompts]
        if "refused" in texts:
            raise ConfigError("the template refuses it")
        return [list((system_prompt + text + ">" if chat_template else text).encode()) for text in texts]


def numbered(num, prefix="q"):
    return [Example(f"{prefix}{i}", {"answer": i}, f"file.jsonl:{i + 1}") for i in range(num)]


def encoded(num, **settings):
    return encode_examples(numbered(num), ByteTokenizer(), PromptsConfig(max_tokens=6, **settings))[0]


def stream(num, *, seed=0, shuffle=True):
    return PromptStream(encoded(num), PromptsConfig(max_tokens=6, shuffle=shuffle), Ledger(), seed=seed)


def answers(batch):
    return [example.columns["answer"] for example in batch.examples]


def assert_equal_batches(a, b):
    for x, y in ((a.tokens, b.tokens), (a.length, b.length), (a.group_id, b.group_id)):
        np.testing.assert_array_equal(x, y, strict=True)
    assert a.examples == b.examples


# The stream


def test_batch_holds_padded_tokens_lengths_and_ids():
    examples, messages = encode_examples(
        [Example("ab", {}), Example("", {})], ByteTokenizer(), PromptsConfig(max_tokens=5, system_prompt="s")
    )
    batch = batch_of(examples[::-1], range(7, 9))
    np.testing.assert_array_equal(
        batch.tokens, np.array([[115, 62, 0, 0, 0], [115, 97, 98, 62, 0]], np.int32), strict=True
    )
    np.testing.assert_array_equal(batch.length, np.array([2, 4], np.int32), strict=True)
    np.testing.assert_array_equal(batch.group_id, np.array([7, 8], np.int32), strict=True)
    assert [e.prompt for e in batch.examples] == ["", "ab"] and messages == []


def test_each_pass_holds_every_question_once_in_a_new_order():
    order = answers(stream(50).next_batch(150))
    passes = [order[i : i + 50] for i in (0, 50, 100)]
    assert all(sorted(one) == list(range(50)) for one in passes)
    # Equal or unshuffled passes: 1 in 50!.
    assert passes[0] != passes[1] != passes[2] != passes[0] and list(range(50)) not in passes
    assert order == answers(stream(50).next_batch(150)) != answers(stream(50, seed=1).next_batch(150))


def test_without_shuffle_the_order_is_that_of_the_file():
    questions = stream(3, shuffle=False)
    assert answers(questions.next_batch(2)) + answers(questions.next_batch(5)) == [0, 1, 2, 0, 1, 2, 0]


def test_prompt_ids_count_the_stream_and_never_repeat():
    questions = stream(4)
    ids = np.concatenate([questions.next_batch(3).group_id for _ in range(5)])
    np.testing.assert_array_equal(ids, np.arange(15, dtype=np.int32), strict=True)


@pytest.mark.parametrize("shuffle", [True, False])
def test_stream_restored_at_any_step_goes_on_bitwise(shuffle):
    uninterrupted = stream(7, shuffle=shuffle)
    states, batches = [], []
    for _ in range(8):  # three questions a step: over two ends of a pass
        states.append(json.dumps(uninterrupted.state()))
        batches.append(uninterrupted.next_batch(3))
    for step, state in enumerate(states):
        resumed = stream(7, shuffle=shuffle)
        resumed.next_batch(step % 3 + 1)  # whatever it did before
        resumed.restore(json.loads(state))
        for expected in batches[step:]:
            assert_equal_batches(resumed.next_batch(3), expected)


def test_order_does_not_depend_on_the_batch_size():
    one, many = stream(7), stream(7)
    assert [answers(one.next_batch(1))[0] for _ in range(20)] == answers(many.next_batch(20))


def test_stream_of_other_questions_is_not_restored():
    state = stream(7).state()
    for other in (stream(8), stream(7, seed=1), stream(7, shuffle=False)):
        with raises_with(ConfigError, "fingerprint"):
            other.restore(state)


def test_questions_whose_hidden_word_has_changed_are_others():
    """Their prompts are equal, but the statistics of one question are not those of the other."""
    rows = lambda *words: [EncodedExample(Example("guess", {}, hidden=word), np.arange(3), 8) for word in words]
    of = lambda *words: PromptStream(rows(*words), PromptsConfig(), Ledger(), seed=0)
    state = of("apple", "grape").state()
    of("apple", "grape").restore(state)
    with raises_with(ConfigError, "fingerprint"):
        of("melon", "grape").restore(state)


def test_a_file_with_other_answers_or_held_out_questions_is_refused_unless_allowed():
    rows = lambda *answers: [
        EncodedExample(Example(f"q{i}", {"answer": answer, "made": [datetime.date(2026, 1, 1), b"x"]}), np.arange(3), 8)
        for i, answer in enumerate(answers)
    ]
    of = lambda train, held_out, source="parquet": PromptStream(
        rows(*train), PromptsConfig(source=source), Ledger(), seed=0, held_out=rows(*held_out)
    )
    state = json.loads(json.dumps(of("ab", "cd").state()))
    of("ab", "cd").check(state, allow_changes=False)
    for sets, changed in (
        (("aX", "cd"), ["answers"]),
        (("ab", "cX"), ["held-out questions"]),
        (("ab", "c"), ["held-out questions"]),
        (("Xb", "Xd"), ["answers", "held-out questions"]),
    ):
        with raises_with(ConfigError, *changed, "--allow_config_changes"):
            of(*sets).check(state, allow_changes=False)
        of(*sets).check(state, allow_changes=True)
        of(*sets).restore(state)
        of(*sets).check({"fingerprint": state["fingerprint"]}, allow_changes=False)  # an earlier version's
    of("aX", "cd", "reasoning_gym").check(of("ab", "cd", "reasoning_gym").state(), allow_changes=False)


# Held-out questions


def test_no_held_out_question_is_trained_on():
    examples = [Example(f"q{i % 10}", {"answer": i}) for i in range(35)]
    train, held_out = split_held_out(examples, 4, seed=3)
    out = {e.prompt for e in held_out}
    assert len(held_out) == len(out) == 4 and not out & {e.prompt for e in train}
    assert [e for e in examples if e.prompt not in out] == list(train)  # the rest, in order, repetitions too
    assert all(e.columns["answer"] < 10 for e in held_out)  # the first of its kind
    assert split_held_out(examples, 4, seed=3) == (train, held_out) != split_held_out(examples, 4, seed=4)


def test_conversations_are_the_same_question_when_their_messages_are():
    def asked(text):
        return Example([{"role": "user", "content": text}], {})

    train, held_out = split_held_out([asked("a"), asked("b"), asked("a")], 1, seed=0)
    assert {e.prompt[0]["content"] for e in train}.isdisjoint(e.prompt[0]["content"] for e in held_out)


def test_words_that_an_environment_hides_are_questions_of_their_own(tmp_path):
    """All prompts are the same text. A copy of a row is still one question."""
    words = ["crane", "slate", "crane", "pound"]
    lines = [json.dumps({"prompt": "Guess.", "word": word}) for word in words]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    prompts = PromptsConfig(source="jsonl", name=str(tmp_path / "words.jsonl"), size=0, chat_template=False)
    wordle = EnvironmentsConfig(factory="jaxrl_llm.examples.wordle:Wordle", num_workers=1)
    config = dataclasses.replace(Config(), prompts=prompts, environments=wordle, eval=EvalConfig(num_prompts=1))
    train, held_out, _ = evaluation.questions(config, ByteTokenizer())
    (out,) = {row.example.columns["word"] for row in held_out}
    assert [row.example.columns["word"] for row in train] == [word for word in words if word != out]
    stream = PromptStream(train, dataclasses.replace(prompts, shuffle=False), Ledger(), seed=0)
    ids = [stream.question_id(i) for i in range(len(train))]
    assert len(set(ids)) == 2 and all(
        (ids[i] == ids[j]) == (train[i].example.columns == train[j].example.columns)
        for i in range(len(train))
        for j in range(i)
    )


def test_no_text_is_trained_on_whose_tokens_are_a_held_out_question_s(tmp_path, capfd):
    """A template that trims makes one question of several texts."""

    class Trimming(ByteTokenizer):
        def encode_prompts(self, prompts, **given):
            return super().encode_prompts([text.strip() for text in prompts], **given)

    path = tmp_path / "q.jsonl"
    path.write_text("".join(f"{json.dumps({'prompt': text})}\n" for i in range(6) for text in (f"q{i}", f" q{i}\n")))
    given = {"prompts": {"source": "jsonl", "name": str(path), "chat_template": False}}
    config = freeze(given | {"eval": {"num_prompts": 2}, "rewards": {"functions": ("x:y",)}})
    train, held_out, _ = evaluation.questions(config, Trimming())
    of = lambda rows: [row.example.prompt.strip() for row in rows]
    left = [f"q{i}" for i in range(6) for _ in "ab"]
    assert len(set(of(held_out))) == 2 and of(train) == [text for text in left if text not in of(held_out)]
    warning = capfd.readouterr().err
    assert warning.startswith("warning: 2 training questions are left out") and warning.count("\n") == 1
    as_it_is = evaluation.questions(config, ByteTokenizer())[0]  # other tokens, other questions
    assert len(as_it_is) == 10 and not capfd.readouterr().err
    path.write_text('{"prompt": "a"}\n{"prompt": "a "}\n')
    config = freeze(given | {"eval": {"num_prompts": 1}, "rewards": {"functions": ("x:y",)}})
    with refused("prompts.source", "jsonl", "no training question", "eval.num_prompts"):
        evaluation.questions(config, Trimming())
    (tmp_path / "test.jsonl").write_text('{"prompt": "\\na"}\n{"prompt": "b"}\n')
    of_file = {"num_prompts": 2, "name": str(tmp_path / "test.jsonl")}
    config = freeze(given | {"eval": of_file, "rewards": {"functions": ("x:y",)}})
    assert len(evaluation.questions(config, Trimming())[0]) == 2
    assert capfd.readouterr().err.startswith("warning: 1 of the 2 held-out questions of eval.name=")


def test_holding_out_nothing_keeps_everything_and_everything_is_refused():
    examples = numbered(5) + numbered(5)
    assert split_held_out(examples, 0, seed=0) == (tuple(examples), ())
    assert len(split_held_out(examples, 4, seed=0)[0]) == 2
    with refused("eval.num_prompts", 5):
        split_held_out(examples, 5, seed=0)


# Long prompts


def test_long_prompts_are_refused_or_counted_and_left_out():
    examples = [Example("ab", {}, "f.jsonl:1"), Example("abcdef", {}, "f.jsonl:2"), Example("abcde", {}, "f.jsonl:3")]
    refuse = PromptsConfig(max_tokens=5, chat_template=False)
    with refused_row("f.jsonl", 2, "6 tokens", "prompts.max_tokens=5"):
        encode_examples(examples, ByteTokenizer(), refuse)
    skip = PromptsConfig(max_tokens=5, chat_template=False, long_prompt="skip")
    kept, messages = encode_examples(examples, ByteTokenizer(), skip)
    assert [row.example.prompt for row in kept] == ["ab", "abcde"]
    (message,) = messages
    check_row(message, "f.jsonl", 2, "6 tokens", "prompts.max_tokens=5")
    with refused_row("f.jsonl", 1, "3 tokens", "prompts.max_tokens=1"):
        encode_examples(examples, ByteTokenizer(), PromptsConfig(max_tokens=1, long_prompt="skip"))


def test_prompts_that_have_no_token_ids_are_named_or_left_out_wherever_they_stand():
    texts = ["refused" if i in (0, 15, 16, 130, 199) else str(i) for i in range(200)]
    examples = [Example(text, {}, f"f:{i}") for i, text in enumerate(texts)]
    with refused_row("f", 0, "the template refuses it", "prompts.bad_row='skip'"):
        encode_examples(examples, ByteTokenizer(), PromptsConfig(chat_template=False))
    skip = PromptsConfig(chat_template=False, bad_row="skip")
    kept, messages = encode_examples(examples, ByteTokenizer(), skip)
    assert [row.example.prompt for row in kept] == [text for text in texts if text != "refused"]
    assert [bytes(row.tokens.tolist()).decode() for row in kept] == [row.example.prompt for row in kept]
    assert messages == [f"f:{i}: the template refuses it" for i in (0, 15, 16, 130, 199)]
    with refused_row("f", 0, "the template refuses it"):
        encode_examples(examples[:1], ByteTokenizer(), skip)


def test_the_first_prompt_that_is_refused_ends_it():
    class Counting(ByteTokenizer):
        calls = 0

        def encode_prompts(self, prompts, **how):
            self.calls += 1
            time.sleep(0.001)
            return super().encode_prompts(prompts, **how)

    tokenizer = Counting()
    with refused_row("f", 0, "9 tokens"):
        examples = [Example("too long!", {}, f"f:{i}") for i in range(100_000)]
        encode_examples(examples, tokenizer, PromptsConfig(max_tokens=8, chat_template=False))
    assert tokenizer.calls < 4000  # of 6250 in all; those that had begun


def test_questions_take_the_room_of_their_tokens_and_not_of_the_longest():
    wide = encode_examples(numbered(3), ByteTokenizer(), PromptsConfig(max_tokens=10**6, chat_template=False))[0]
    assert [row.tokens.nbytes for row in wide] == [8, 8, 8]
    assert batch_of(wide[2:], [0]).tokens.shape == (1, 10**6)


def retiring(num, rate=0.75, **settings):
    return PromptStream(encoded(num), PromptsConfig(max_tokens=6, retire_pass_rate=rate, **settings), Ledger(), seed=0)


def observe(questions, outcomes):
    """Count answers. ``outcomes`` maps a question to the passes of its answers, None if the reward failed."""
    flat = [passed for group in outcomes.values() for passed in group]
    passed, scored = np.array([p is True for p in flat]), np.array([p is not None for p in flat])
    questions.ledger.observe(list(outcomes), passed, scored)


def test_solved_questions_are_not_asked_again_and_ids_stay_positions():
    questions = retiring(4, shuffle=False)
    assert answers(questions.next_batch(4)) == [0, 1, 2, 3]
    # Pass rates 1, 3/4, 1/2; of question 3 nothing is known.
    observe(questions, {0: [True] * 4, 1: [True] * 3 + [False], 2: [True, False] * 2, 3: [None] * 4})
    assert questions.retired() == {0, 1}
    batch = questions.next_batch(3)
    assert answers(batch) == [2, 3, 2] and batch.group_id.tolist() == [6, 7, 10]
    assert [questions.question_id(i) for i in batch.group_id] == [2, 3, 2]
    # All answers count: 5 of 8, then 9 of 12.
    observe(questions, {2: [True] * 3 + [False]})
    assert questions.retired() == {0, 1}
    observe(questions, {2: [True] * 4})
    assert questions.retired() == {0, 1, 2}


def test_of_a_ladder_each_question_waits_until_the_easier_one_has_passed():
    """Two ladders of three questions and one question without a ladder.

    Questions move to the last one, which is never retired.
    """
    examples = [dataclasses.replace(one, ladder=x) for one, x in zip(numbered(7), "aaabbb", strict=False)]
    rows = encode_examples([*examples, numbered(7)[6]], ByteTokenizer(), PromptsConfig(max_tokens=6))[0]
    config = PromptsConfig(max_tokens=6, retire_pass_rate=0.75, shuffle=False)
    questions = PromptStream(rows, config, Ledger(), seed=0)
    asked = lambda: sorted(set(answers(questions.next_batch(12))))
    assert asked() == [0, 3, 6]
    observe(questions, {0: [True] * 3 + [False], 3: [True, False] * 2, 6: [None] * 4})
    assert asked() == [1, 3, 6]
    observe(questions, {1: [True] * 4, 3: [True] * 4})
    assert asked() == [2, 4, 6]
    observe(questions, {2: [True], 4: [True], 6: [True]})
    assert asked() == [2, 5]
    observe(questions, {5: [True]})
    assert asked() == [2, 5]  # all are solved: the last ones are asked on, and the easier ones no more
    assert questions.retired() == {0, 1, 3, 4, 6}


def test_when_everything_is_solved_everything_is_asked_again():
    questions = retiring(3, shuffle=False)
    observe(questions, {i: [True] for i in range(3)})
    assert answers(questions.next_batch(4)) == [0, 1, 2, 0]


def test_what_was_solved_survives_a_checkpoint_and_nothing_retires_unasked():
    questions, resumed = retiring(50), retiring(50)
    observe(questions, {questions.question_id(i): [True, i % 2 == 0] for i in range(10)})
    resumed.restore(json.loads(json.dumps(questions.state())))
    resumed.ledger.restore(json.loads(json.dumps(questions.ledger.state())))
    assert len(resumed.retired()) == 5
    assert_equal_batches(resumed.next_batch(100), questions.next_batch(100))
    plain = stream(3)
    observe(plain, {0: [True]})
    assert plain.retired() == set()


def test_a_prompt_without_tokens_is_refused():
    with refused_row("f", 1):
        encode_examples([Example("", {}, "f:1")], ByteTokenizer(), PromptsConfig(chat_template=False))


def test_a_question_that_was_changed_since_the_checkpoint_is_noticed():
    state = stream(7).state()
    changed = [*numbered(6), Example("q7", {"answer": 6}, "file.jsonl:7")]
    rows = encode_examples(changed, ByteTokenizer(), PromptsConfig(max_tokens=6))[0]
    with raises_with(ConfigError, "fingerprint"):
        PromptStream(rows, PromptsConfig(max_tokens=6), Ledger(), seed=0).restore(state)


# Files


def load_jsonl(path, text, **settings):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return tasks.load(PromptsConfig(source="jsonl", name=str(path), **settings), seed=0)


def test_jsonl_rows_become_prompts_and_columns(tmp_path):
    path = tmp_path / "q.jsonl"
    conversation = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]
    text = "\n".join(
        [
            json.dumps({"prompt": "Grüße", "answer": 3, "tags": ["a"]}),
            "",
            json.dumps({"messages": conversation, "answer": 2}),
            json.dumps({"prompt": conversation}),
        ]
    )
    loaded = load_jsonl(path, "\ufeff" + text)
    assert loaded.bad_rows == ()
    assert loaded.examples == (
        Example("Grüße", {"answer": 3, "tags": ["a"]}, f"{path}:1"),
        Example(conversation, {"answer": 2}, f"{path}:3"),
        Example(conversation, {}, f"{path}:4"),
    )
    assert tasks.scorer(PromptsConfig(source="jsonl", name="x")) == ""


BAD_ROWS = [
    (b'{"prompt": "a"', ["JSON", "column 15"]),
    (b'{"prompt": "\xe4"}', ["UTF-8", "0xe4"]),
    (b"[1]", ["`prompt`", "`messages`", "list"]),
    (b'{"question": "a"}', ["`prompt`", "`messages`", "['question']"]),
    (b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', ["`prompt`", "`messages`"]),
    (b'{"prompt": 3}', ["`prompt`", "3"]),
    (b'{"prompt": ""}', ["`prompt`"]),
    (b'{"messages": "a"}', ["`messages`"]),
    (b'{"messages": []}', ["`messages`"]),
    (b'{"messages": [{"role": "user"}]}', ["`role`", "`content`"]),
    (
        b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}, {"role": "tool", "content": "1"}]}',
        ["`tool_calls`"],
    ),
    (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', ["nothing is left"]),
    (b'{"prompt": "a", "completions": 1}', ["`completions`"]),
    (b"[" * 100_000, ["JSON", "nested"]),
    # Half of this depth is already too deep for the process that passes columns to reward functions.
    (b'{"prompt": "a", "x": ' + b"[" * 600 + b"]" * 600 + b"}", ["JSON", "nested"]),
    (b'{"prompt": "a", "x": ' + b'{"x": ' * 101 + b"1" + b"}" * 102, ["JSON", "nested"]),
    (b'{"prompt": "a\0"}', ["JSON", "column 14"]),
    (b'{"prompt": "a"}\r{"prompt": "b"}', ["JSON", "column 17"]),
    (b'{"prompt": "a", "x": ' + b"1" * 5000 + b"}", ["JSON", "4300"]),
    (b'{"prompt": "a", "prompt": "b"}', ["'prompt'"]),
    (b'{"prompt": "a", "x": [{"y": 1, "z": 2, "y": 1}]}', ["'y'"]),
    (b'{"prompt": NaN}', ["`prompt`", "nan"]),
    (b'{"prompt": ["a"]}', ["`role`", "`content`", "'a'"]),
    (
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}',
        ["`role`", "`content`"],
    ),
    (b'{"messages": [{"role": "assistant", "content": null, "tool_calls": []}]}', ["`role`", "`content`"]),
    ('{"prompt": "a"}'.encode("utf-16"), ["UTF-8", "0xff at 0"]),
    (gzip.compress(b'{"prompt": "a"}', mtime=0).replace(b"\n", b""), ["UTF-8", "0x8b at 1"]),
    (b'{"prompt": "\xed\xa0\x80"}', ["UTF-8", "0xed at 12"]),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_bad_row_is_named_by_file_and_line_and_refused_or_skipped(tmp_path, row, words):
    path = tmp_path / "q.jsonl"
    text = b'{"prompt": "a"}\n\n' + row + b'\n{"prompt": "b"}\n'
    with refused_row(path, 3, "prompts.bad_row", *words) as error:
        load_jsonl(path, text)
    assert "\n" not in str(error.value)
    loaded = load_jsonl(path, text, bad_row="skip")
    assert [e.prompt for e in loaded.examples] == ["a", "b"]
    assert [e.origin for e in loaded.examples] == [f"{path}:1", f"{path}:4"]
    assert len(loaded.bad_rows) == 1
    check_row(loaded.bad_rows[0], path, 3, *words)


def test_unusual_texts_and_columns_come_through_as_they_are(tmp_path):
    rows = [
        ('{"prompt": "a\\u0000b"}', "a\0b", {}),
        ('{"prompt": "a\u2028b\x85c\\ud83d\\ude42"}\r', "a\u2028b\x85c🙂", {}),
        ('\ufeff{"prompt": " ", "x": 123456789012345678901234567890}', " ", {"x": 123456789012345678901234567890}),
        ('{"prompt": "p", "x": 1e400, "y": -Infinity}', "p", {"x": math.inf, "y": -math.inf}),
        ('{"prompt": "p", "x": "now a text"}', "p", {"x": "now a text"}),
        ('{"prompt": "p", "x": [[{"y": [1]}], {}], "messages": null}', "p", {"x": [[{"y": [1]}], {}]}),
        ('{"prompt": "p", "\\ud800": "\\ud800"}', "p", {"\ud800": "\ud800"}),
    ]
    loaded = load_jsonl(tmp_path / "q.jsonl", "\n".join(row for row, _, _ in rows))
    assert [(e.prompt, e.columns) for e in loaded.examples] == [(prompt, columns) for _, prompt, columns in rows]
    # JSON has no such number, Python writes it all the same.
    (example,) = load_jsonl(tmp_path / "q.jsonl", '{"prompt": "p", "x": NaN}').examples
    assert math.isnan(example.columns["x"])


def test_columns_of_any_name_reach_the_reward_function(tmp_path):
    names = ["self", "function", "columns", "completion", "**", "a b", "", "class", "é", "1", "_line", "\n"]
    row = {"prompt": "p"} | {name: [i] for i, name in enumerate(names)}
    (example,) = load_jsonl(tmp_path / "q.jsonl", json.dumps(row)).examples
    seen = []

    def reward(prompts, completions, **columns):
        seen.append(columns)
        return [1.0] * len(completions)

    assert reward_worker.call(reward, example.prompt, example.columns, ["a", "b"]) == ([1.0, 1.0], [], [{}, {}])
    assert seen == [{name: [[i], [i]] for i, name in enumerate(names)}]


def test_columns_get_the_names_that_tasks_look_for(tmp_path):
    """GSM8K's and MATH's unchanged rows, and how their answers are compared."""
    config = pathlib.Path(__file__).parents[2] / "configs" / "gsm8k_smollm2_135m.py"
    spec = importlib.util.spec_from_file_location("gsm8k", config)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given = freeze(module.get_config()).prompts
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "She has 3 * 24 = 72.\n#### 72"}) + "\n")
    (row,) = tasks.load(dataclasses.replace(given, name=str(path)), seed=0).examples
    assert row.prompt == "How many?" and list(row.columns) == ["answer"]
    math = pytest.importorskip("jaxrl_llm.scoring.math_answers").reward
    answers = ["so \\boxed{72}", "The answer is 72.", "\\boxed{27}"]
    assert math([], answers, answer=[row.columns["answer"]] * 3) == [1.0, 1.0, 0.0]
    path.write_text(json.dumps({"problem": "Half of 1?", "solution": "It is $\\boxed{\\frac{1}{2}}$."}))
    of_math = {"prompt": "problem", "answer": "solution"}
    (row,) = tasks.load(dataclasses.replace(given, name=str(path), arguments=of_math), seed=0).examples
    assert math([], ["\\boxed{0.5}"], answer=[row.columns["answer"]]) == [1.0]
    for arguments, named in (
        ({"prompt": "question"}, ("prompts.arguments.prompt", "question", "['problem'")),
        ({"prompt": "problem", "solution": "problem"}, ("prompts.arguments.solution", "problem")),
        ({"prompt": 3}, ("prompts.arguments.prompt", 3)),
    ):
        with refused(*named, str(path)):
            tasks.load(dataclasses.replace(given, name=str(path), arguments=arguments), seed=0)


def test_messages_may_have_any_role_and_what_a_template_does_not_know_is_dropped(tmp_path):
    roles = ["system", "developer", "user", "tool", "function", "assistant", "system", "", "<|x|>", "user"]
    turns = [{"role": role, "content": str(i), "name": "n", "tool_calls": []} for i, role in enumerate(roles)]
    (example,) = load_jsonl(tmp_path / "q.jsonl", json.dumps({"messages": turns})).examples
    assert example.prompt == [{"role": role, "content": str(i)} for i, role in enumerate(roles)]


def test_size_limits_the_questions_read_and_zero_reads_all(tmp_path):
    text = '{"prompt": "a"}\noops\n{"prompt": "b"}\n{"prompt": "c"}\n'
    path = tmp_path / "q.jsonl"
    assert [e.prompt for e in load_jsonl(path, text, size=2, bad_row="skip").examples] == ["a", "b"]
    assert len(load_jsonl(path, text, size=0, bad_row="skip").examples) == 3


def test_rows_that_size_leaves_out_are_said_and_cut_no_file_of_held_out_questions(tmp_path):
    """Once, a file of more than 1,024 rows was cut without a message, and so was the file of eval.name."""
    path, text = tmp_path / "q.jsonl", "".join(f'{{"prompt": "{i}"}}\n' for i in range(5))
    assert load_jsonl(path, text, size=3).bad_rows == (f"the rows after {path}:3 (prompts.size=3; 0 reads all)",)
    assert load_jsonl(path, text, size=5).bad_rows == load_jsonl(path, text, size=0).bad_rows == ()
    few = {"source": "jsonl", "name": str(path), "size": 3}
    config = freeze({"prompts": few, "eval": {"name": str(path), "num_prompts": 4}, "rewards": {"functions": ("x:y",)}})
    train, held_out, skipped = evaluation.questions(config, make_byte_tokenizer())
    assert len(train) == 3 and [row.example.prompt for row in held_out] == ["0", "1", "2", "3"]
    assert len(skipped) == 1


@pytest.mark.parametrize(("num_prompts", "said"), [(4, "2 of the 4"), (1, "")])
def test_held_out_questions_that_are_trained_on_too_are_counted(num_prompts, said, tmp_path, capfd):
    asked = {"train": "abcd", "test": "zdya"}
    for name, prompts in asked.items():
        rows = [{"prompt": prompt, "answer": name} for prompt in prompts]  # other answers make no other questions
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path = {name: str(tmp_path / f"{name}.jsonl") for name in asked}
    given = {"prompts": {"source": "jsonl", "name": path["train"]}, "rewards": {"functions": ("x:y",)}}
    config = freeze(given | {"eval": {"name": path["test"], "num_prompts": num_prompts}})
    train, held_out, _ = evaluation.questions(config, make_byte_tokenizer())
    assert (len(train), len(held_out)) == (4, num_prompts)
    warning = capfd.readouterr().err
    assert warning.startswith(f"warning: {said} held-out questions ") if said else not warning
    if said:
        check_refusal(warning, "eval.name", path["test"], f"prompts.name={path['train']!r}")


def test_words_of_another_file_are_other_questions_where_an_environment_hides_them(tmp_path, capfd):
    for name, words in {"train": ("crane", "slate"), "test": ("pound", "slate")}.items():
        lines = [json.dumps({"prompt": "Guess.", "word": word}) for word in words]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    prompts = PromptsConfig(source="jsonl", name=str(tmp_path / "train.jsonl"), chat_template=False)
    wordle = EnvironmentsConfig(factory="jaxrl_llm.examples.wordle:Wordle", num_workers=1)
    evals = EvalConfig(name=str(tmp_path / "test.jsonl"), num_prompts=2)
    config = dataclasses.replace(Config(), prompts=prompts, environments=wordle, eval=evals)
    evaluation.questions(config, ByteTokenizer())
    assert "warning: 1 of the 2 " in capfd.readouterr().err


def test_what_is_wrong_with_the_file_of_held_out_questions_names_it(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "a"}\n')
    given = {"prompts": {"source": "jsonl", "name": str(path)}, "rewards": {"functions": ("x:y",)}}
    config = freeze(given | {"eval": {"name": f"{tmp_path}/nope.jsonl", "num_prompts": 1}})
    with refused("eval.name", f"{tmp_path}/nope.jsonl") as error:
        evaluation.questions(config, make_byte_tokenizer())
    assert "prompts.name" not in str(error.value)


def test_file_without_questions_is_refused(tmp_path):
    path = tmp_path / "q.jsonl"
    with refused("prompts.name", str(path)):
        load_jsonl(path, "\n\n")
    with refused("prompts.name", str(path), "2 rows", f"{path}:1: "):
        load_jsonl(path, "1\n2\n", bad_row="skip")


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_file_that_cannot_be_read_is_refused(tmp_path, source, monkeypatch):
    if source == "parquet":
        pytest.importorskip("pyarrow")
    os.mkfifo(tmp_path / "fifo")  # no process writes to it, so opening it would never return
    cases = [
        (tmp_path / "none", "No such file"),
        (tmp_path, f"{tmp_path}/"),
        (tmp_path / "*.none", "No such file"),
        ("~nobody_of_this_name/q.jsonl", "No such file"),
        (tmp_path / "fifo", "regular file"),
        ("/dev/zero", "regular file"),
        ("/dev/null", "regular file"),
    ]
    for path, words in cases:
        with refused("prompts.name", str(path), words):
            tasks.load(PromptsConfig(source=source, name=str(path)), seed=0)

    def forbidden(*_):
        raise PermissionError(13, "Permission denied")  # the root user of a test machine may read every file

    monkeypatch.setattr(pathlib.Path, "open", forbidden)
    with refused("prompts.name", "x", "Permission denied"):
        tasks.load(PromptsConfig(source=source, name="x"), seed=0)


def test_a_file_without_line_ends_is_not_read_into_memory(tmp_path):
    path = tmp_path / "endless"
    path.write_bytes(b'{"prompt": "a"}\n')
    os.truncate(path, 2**30)  # a hole: nothing is on the disk
    with refused_row(path, 2, "64 MiB"):
        tasks.load(PromptsConfig(source="jsonl", name=str(path)), seed=0)
    assert len(tasks.load(PromptsConfig(source="jsonl", name=str(path), size=1), seed=0).examples) == 1


def test_a_pattern_is_of_all_files_that_match_by_their_names(tmp_path):
    for name, prompts in {"b-2": "cd", "b-10": "ab", "a": "x", "b-3.txt": "y"}.items():
        (tmp_path / name).write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (tmp_path / "b-folder").mkdir()
    pattern, found = f"{tmp_path}/b-*[0-9]", lambda loaded: [(x.prompt, x.origin) for x in loaded.examples]
    load = lambda name, **how: tasks.load(PromptsConfig(source="jsonl", name=str(name), **how), seed=0)
    of = lambda name, row: f"{tmp_path}/{name}:{row}"
    four = [("a", of("b-10", 1)), ("b", of("b-10", 2)), ("c", of("b-2", 1)), ("d", of("b-2", 2))]
    assert found(load(pattern)) == four
    three = load(pattern, size=3)
    assert found(three) == four[:3] and three.bad_rows == (
        f"the rows after {of('b-2', 1)} (prompts.size=3; 0 reads all)",
    )
    assert load(pattern, size=2).bad_rows == (f"the rows after {of('b-10', 2)} (prompts.size=2; 0 reads all)",)
    (tmp_path / "b-*[0-9]").write_text('{"prompt": "its own"}\n')  # a file of that name is that file
    assert found(load(pattern)) == [("its own", of("b-*[0-9]", 1))]


def test_parquet_rows_become_prompts_and_columns(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "q.parquet"
    turn = {"role": "user", "content": "1+1?", "name": None}
    rows = {
        "prompt": ["a", None, None, "d"],
        "messages": [None, [turn], None, None],
        "answer": [1, 2, 3, None],
        "grid": [[[1, 2]], [], None, [[3]]],
    }
    parquet.write_table(pyarrow.table(rows), path)
    config = PromptsConfig(source="parquet", name=str(path), bad_row="skip")
    loaded = tasks.load(config, seed=0)
    assert loaded.examples == (
        Example("a", {"answer": 1, "grid": [[1, 2]]}, f"{path}:1"),
        Example([{"role": "user", "content": "1+1?"}], {"answer": 2, "grid": []}, f"{path}:2"),
        Example("d", {"answer": None, "grid": [[3]]}, f"{path}:4"),
    )
    assert len(loaded.bad_rows) == 1 and loaded.bad_rows[0].startswith(f"{path}:3: must have one of")

    path.write_text("these are not columns")
    with refused("prompts.name", str(path), "Parquet"):
        tasks.load(config, seed=0)


@pytest.fixture
def load_table(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def load(columns, **settings):
        """Read a table, or ``{name: (values, type)}``, as questions."""
        if isinstance(columns, dict):
            columns = pyarrow.table({name: pyarrow.array(*given) for name, given in columns.items()})
        parquet.write_table(columns, tmp_path / "q.parquet")
        return tasks.load(PromptsConfig(source="parquet", name=str(tmp_path / "q.parquet"), **settings), seed=0)

    return load


def test_parquet_columns_of_any_type_come_through_as_python_has_them(load_table):
    pyarrow = pytest.importorskip("pyarrow")
    day = datetime.datetime(2020, 1, 2, 3, 4, 5)
    columns = {
        "prompt": (["a"], pyarrow.large_string()),
        "self": ([day], pyarrow.timestamp("us")),
        "a b": ([day.replace(tzinfo=datetime.UTC)], pyarrow.timestamp("us", tz="UTC")),
        "": ([decimal.Decimal("1.50")], pyarrow.decimal128(5, 2)),
        "class": ([b"\xff\0"], pyarrow.binary()),
        "**": (
            [[[{"x": [1]}], None]],
            pyarrow.list_(pyarrow.list_(pyarrow.struct({"x": pyarrow.list_(pyarrow.int8())}))),
        ),
        "map": ([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "u": ([2**64 - 1], pyarrow.uint64()),
        "nothing": ([None], pyarrow.null()),
    }
    (example,) = load_table(columns).examples
    expected = [day, day.replace(tzinfo=datetime.UTC), decimal.Decimal("1.50"), b"\xff\0", [[{"x": [1]}], None]]
    assert [*example.columns.values()] == [*expected, [("k", 1)], 2**64 - 1, None]
    assert [*example.columns] == ["self", "a b", "", "class", "**", "map", "u", "nothing"]


def test_parquet_rows_that_are_no_questions_are_named(load_table):
    pyarrow = pytest.importorskip("pyarrow")
    not_text = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"a\xff")]
    )
    prompts = ["a", "b"], pyarrow.string()
    turns = [[{"role": "user", "content": "a"}], [{"role": "user", "content": None}]]
    times = pyarrow.timestamp("us")
    for columns, row, words in [
        ({"prompt": ([1, 2], pyarrow.int64())}, 1, ["`prompt`", "1"]),
        ({"prompt": ([b"a"], pyarrow.binary())}, 1, ["`prompt`", "b'a'"]),
        ({"prompt": (["a", None], pyarrow.string())}, 2, ["`prompt`", "`messages`"]),
        ({"messages": (turns,)}, 2, ["`role`", "`content`"]),
        ({"prompt": prompts, "t": ([0, 2**62], times)}, 2, ["`t`", "timestamp[us]"]),
        ({"prompt": prompts, "d": ([0, 2**31 - 1], pyarrow.date32())}, 2, ["`d`", "date32[day]"]),
        (pyarrow.table({"prompt": not_text}), 2, ["`prompt`", "string", "utf-8"]),
    ]:
        with refused_row("q.parquet", row, *words, "prompts.bad_row='skip'"):
            load_table(columns)
        if row == 2:
            loaded = load_table(columns, bad_row="skip")
            assert [example.origin[-2:] for example in loaded.examples] == [":1"] and len(loaded.bad_rows) == 1
    with refused("prompts.name", ANY, "q.parquet"):
        load_table({"prompt": ([], pyarrow.string())})
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"])
    with raises_with(ConfigError, "q.parquet", "['prompt', 'prompt']"):
        load_table(twice)


def test_a_damaged_parquet_file_is_one_line(load_table, tmp_path):
    pyarrow, path = pytest.importorskip("pyarrow"), tmp_path / "q.parquet"
    load_table({"prompt": (["a"] * 50,), "answer": ([1] * 50,), "x": ([[1]] * 50, pyarrow.list_(pyarrow.int64()))})
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    num_refused = 0
    path.write_bytes(whole.replace(b"answer", b"\xffnswer"))
    with refused("prompts.name", str(path), "utf-8"):
        tasks.load(PromptsConfig(source="parquet", name=str(path)), seed=0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(random.integers(1, 6)):
            damaged[random.integers(len(whole))] = random.integers(256)
        path.write_bytes(damaged)
        try:
            tasks.load(PromptsConfig(source="parquet", name=str(path)), seed=0)
        except ConfigError:  # and nothing else
            num_refused += 1
    assert num_refused > 100


# Letters


def test_letters_have_no_arguments():
    with refused("prompts.arguments.terms", 3, "prompts.source"):
        letters.load(PromptsConfig(arguments={"terms": 3}), seed=0)


def test_letters_are_learnable_by_hand():
    config = PromptsConfig(size=28)
    loaded = tasks.load(config, seed=0)
    assert loaded == tasks.load(config, seed=1)
    assert [e.prompt for e in loaded.examples[:2]] == ["Write letters like a:", "Write letters like b:"]
    assert loaded.examples[26].columns == {"allowed": "abcdefghijklmnopqrstuvwxyz"}
    assert len({e.prompt for e in loaded.examples}) == 26
    assert max(len(e.prompt.encode()) for e in loaded.examples) <= PromptsConfig().max_tokens
    assert letters.reward(["?"] * 4, ["", "a", "aBzB", "X 1"], allowed=["az"] * 4) == [0.0, 1.0, 0.5, 0.0]
    assert tasks.scorer(config) == "jaxrl_llm.questions.tasks.letters:reward"


# Reasoning gym


@pytest.fixture
def gym():
    needs_reasoning_gym()
    from jaxrl_llm.questions.tasks import reasoning_gym_task

    return reasoning_gym_task


def gym_config(name="chain_sum", size=40, **arguments):
    return PromptsConfig(source="reasoning_gym", name=name, size=size, arguments=arguments)


def test_neighbouring_seeds_share_all_questions_but_one_of_each_level_and_far_ones_few(gym):
    """The page run_a_sweep states this:

    a dataset's i-th question is drawn from seed + i, and 30 of 3 levels are ten of each.
    """
    of = lambda seed: {row.prompt for row in tasks.load(gym_config(size=30, levels=3), seed=seed).examples}
    assert len(of(0) & of(1)) == 27 and len(of(0) & of(10_000)) < 3


def test_a_dataset_whose_questions_are_other_ones_in_each_process_is_refused(gym, monkeypatch):
    config = gym_config("ransom_note", size=3)
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # the advice of the message
    assert len(tasks.load(config, seed=1).examples) == 3
    for value in ("random", None):
        monkeypatch.setenv("PYTHONHASHSEED", value) if value else monkeypatch.delenv("PYTHONHASHSEED")
        with refused("prompts.name", "ransom_note", "PYTHONHASHSEED=0"):
            tasks.load(config, seed=1)


def test_its_environment_asks_again_until_the_scorer_is_content(gym):
    config = gym_config(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    example = tasks.load(config, seed=5).examples[0]
    right = example.columns["answer"]
    wrong = str(int(right) + 1)
    assert gym.again(example.prompt, [right, f"It is {wrong}."], **example.columns) == "That is not right. Try again."
    assert gym.again(example.prompt, [wrong, f"It is {right}."], **example.columns) is None


def test_reasoning_gym_questions_are_right_and_follow_the_seed(gym):
    config = gym_config(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    loaded = tasks.load(config, seed=5)
    assert loaded == tasks.load(config, seed=5) != tasks.load(config, seed=6)
    assert len(loaded.examples) == 40
    for example in loaded.examples:
        a, sign, b = re.search(r"(\d) ([+-]) (\d) =$", example.prompt).groups()
        right = int(a) + int(b) if sign == "+" else int(a) - int(b)
        assert example.columns["answer"] == str(right)
        completions = [f"{a} {sign} {b} = {right}", f"It is {right}.", str(right + 1), f"{right}, or {right + 1}", ""]
        columns = {key: [value] * 5 for key, value in json.loads(json.dumps(example.columns)).items()}
        assert gym.reward([example.prompt] * 5, completions, **columns) == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("4 - 1 = 3", "3"),
        ("= -3", "-3"),
        ("-3.", "-3"),
        ("5-2", "2"),  # a minus directly after a digit is an operator
        ("5 -2", "-2"),
        ("5 - 2", "2"),
        ("(-12)", "-12"),
        ("x=-7 is the answer", "-7"),
        ("007", "007"),
        ("7.2248", None),  # of other numbers the tail was taken
        ("3, then .5", None),
        ("1,2248", None),
        ("It is 1,234.", "1234"),
        ("-1,000.00", "-1000"),
        ("\u22123", "-3"),
        ("8...5", "5"),
        ("no number - none", None),
        ("", None),
    ],
)
def test_last_integer(gym, text, integer):
    assert gym.last_integer(text) == integer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("  yes \n", "yes"),
        (r"thus \boxed{\frac{1}{2}} holds", r"\frac{1}{2}"),
        (r"\boxed{a} then \boxed{b}", "b"),
        (r"never closed \boxed{a", r"never closed \boxed{a"),
        ("x <answer>no</answer> <answer>\nyes\n</answer> y", "yes"),
        (r"<answer>a</answer> \boxed{b}", "a"),
        ("", ""),
    ],
)
def test_free_answer(gym, text, answer):
    assert gym.free_answer(text) == answer


def test_answers_that_are_no_integers_get_the_raw_score_of_the_dataset(gym):
    example = tasks.load(gym_config("letter_counting", size=1), seed=0).examples[0]
    assert re.fullmatch("[0-9]+", example.columns["answer"])  # an integer: binary
    example = tasks.load(gym_config("spell_backward", size=1), seed=0).examples[0]
    answer = re.search(r"Spell this word backward \(.*\): (\w+)$", example.prompt).group(1)[::-1]
    assert example.columns["answer"] == answer
    columns = {key: [value] * 3 for key, value in example.columns.items()}
    scores = gym.reward([example.prompt] * 3, [f" {answer}\n", f"<answer>{answer}</answer>", ""], **columns)
    assert scores == [1.0, 1.0, 0.0]


def test_dataset_that_takes_any_valid_answer_has_none_of_its_own(gym):
    example = tasks.load(gym_config("rush_hour", size=1), seed=0).examples[0]
    columns = {key: [value] for key, value in example.columns.items()}
    assert example.columns["answer"] is None
    assert gym.reward([example.prompt], ["nonsense"], **columns) == [0.01]  # rush_hour's own score of a wrong answer


# As on a machine whose compiler has built none of the packages that come as source.
WITHOUT_SOURCE_PACKAGES = """
import importlib.util, json, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("pycosat", "cellpylib", "zss") else find(name, *rest)
from jaxrl_llm.actor import evaluation
from jaxrl_llm.scoring import reward_worker
from jaxrl_llm.questions import tasks
from jaxrl_llm.config import ConfigError, PromptsConfig
for name in json.loads(sys.argv[1]):
    try:
        print(name, len(tasks.load(PromptsConfig(source="reasoning_gym", name=name, size=2), seed=0).examples))
    except ConfigError as error:
        print(error)
"""


def test_a_game_whose_package_is_not_there_is_refused_and_the_others_are_played(gym):
    lost = {game: package for package, games in gym.SOURCE_PACKAGES.items() for game in games}
    played = ["chain_sum", "rubiks_cube", "knights_knaves"]
    names = json.dumps([*lost, *played])
    command = [sys.executable, "-c", WITHOUT_SOURCE_PACKAGES, names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    how = "which is built from source: bash launch/setup.sh reasoning (with a C compiler)"
    refused = [f"prompts.name={game!r} needs {package}, {how}" for game, package in lost.items()]
    assert done.stdout.splitlines() == refused + [f"{name} 2" for name in played]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (gym_config("chain_summ"), ("prompts.name", "chain_summ", "chain_sum")),
        (gym_config(min_term=2), ("prompts.arguments.min_term", 2, "chain_sum", "min_terms")),
        (gym_config(seed=2), ("prompts.arguments.seed", 2)),
        (
            gym_config(min_terms=3, max_terms=2),
            ("prompts.arguments", {"min_terms": 3, "max_terms": 2}, "chain_sum", "max_terms must be >= min_terms"),
        ),
        (gym_config(min_terms="two"), ("prompts.arguments", {"min_terms": "two"}, "chain_sum")),
    ],
)
def test_reasoning_gym_settings_that_mean_nothing_are_refused(gym, config, named):
    with refused(*named) as error:
        tasks.load(config, seed=0)
    assert "\n" not in str(error.value)


RIGHT = lambda entry: entry["answer"]


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        ("n_queens", lambda entry: repr([row.split() for row in entry["answer"].split("\n")]), 0.5),
        ("n_queens", "self._string_to_board(entry['metadata']['valid_answers'][0])", 0.0),
        ("binary_matrix", "[x.split() for x in entry['answer'].split('\\n')]", 0.0),
        ("spiral_matrix", "entry['answer'].split()", 0.0),
        ("spiral_matrix", lambda entry: str(entry["answer"].split()), 0.1),
        ("string_insertion", "entry['answer']", 0.0),
        ("string_insertion", RIGHT, 1.0),
        ("countdown", RIGHT, 1.0),
        ("countdown", "9**9**9**9**9", 0.0),  # as any other text that is no sum
        ("countdown", "1", 0.0),
        ("puzzle24", "().__class__", 0.01),
        ("polynomial_multiplication", RIGHT, 1.0),
        ("polynomial_multiplication", "sorted(x)", 0.0),
        ("simple_integration", RIGHT, 1.0),
        ("intermediate_integration", RIGHT, 1.0),
        ("simple_integration", lambda entry: f"Integral({entry['metadata']['integrand']}, x)", 0.0),
        ("simple_integration", "9**9**9**9*x", 0.0),
        ("coin_flip", "1e999999999", 0.0),
        ("complex_arithmetic", "nan", 0.0),
        ("complex_arithmetic", RIGHT, 1.0),
        ("number_sorting", RIGHT, 1.0),
        ("number_sorting", lambda entry: json.dumps([float("nan")] * len(entry["metadata"]["sorted_numbers"])), 0.0),
        ("boxnet", "5", 0.0),  # which its scorer raises at, as at a number for a list
    ],
)
def test_answers_are_no_programs_and_those_that_a_scorer_raises_at_are_wrong(gym, name, said, expected, monkeypatch):
    """Some scorers of reasoning-gym evaluate answers as Python code that can reach the right answer."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # which one of them asks for
    (example,) = tasks.load(gym_config(name, size=1), seed=3).examples
    given = {key: [value] * 2 for key, value in json.loads(json.dumps(example.columns)).items()}
    text = said if isinstance(said, str) else said(example.columns["entry"])
    assert gym.reward([None] * 2, [f"<answer>{text}</answer>", "<answer>?</answer>"], **given)[0] == expected


@pytest.mark.parametrize(
    ("formula", "is_one"),
    [
        ("3*E**(2*x**2 - x + 4) + C", True),
        ("exp(-x**2)/2 + C", True),
        ("2**3*x**2", True),
        ("x**(9**9)", False),
        ("E**(E**9)", False),
        ("(9**9)**9*x", False),
        ("x**100", False),
        ("y", False),
        ("x.__class__", False),
    ],
)
def test_powers_of_variables_are_formulas_and_those_that_fill_the_memory_are_not(gym, formula, is_one):
    assert gym.GUARDS["intermediate_integration"](formula, {"answer": "x + C"}) == is_one


def test_a_scorer_that_raises_at_the_right_answer_too_has_failed(gym):
    (example,) = tasks.load(gym_config("mini_sudoku", size=1), seed=3).examples
    entry = {**example.columns["entry"], "metadata": {}}
    given = {key: [value] for key, value in (example.columns | {"entry": entry}).items()}
    with pytest.raises(KeyError):
        gym.reward([None], ["<answer>1</answer>"], **given)


@pytest.mark.parametrize(("name", "levels"), [("chain_sum", 3), ("chain_sum", 9), ("leg_counting", 3)])
def test_no_question_of_a_level_comes_again_at_the_next(gym, name, levels):
    """A dataset's i-th question is drawn from its seed + i."""
    config = PromptsConfig(source="reasoning_gym", name=name, arguments={"levels": levels}, size=18)
    examples = tasks.load(config, seed=0).examples
    assert len({example.prompt for example in examples}) == len(examples) == 18
    used = [(e.columns["dataset_arguments"]["seed"], i % (18 // levels)) for i, e in enumerate(examples)]
    assert [first + i for first, i in used] == [*range(18)]


def test_datasets_are_mixed_by_weight_and_rise_by_their_curricula(gym):
    arguments = {"chain_sum": {"weight": 2, "levels": 3}, "leg_counting": {}}
    config = PromptsConfig(source="reasoning_gym", name="mix", arguments=arguments, size=30)
    examples = tasks.load(config, seed=0).examples
    assert examples == tasks.load(config, seed=0).examples != tasks.load(config, seed=1).examples
    kinds = [example.columns["dataset"] for example in examples]
    assert collections.Counter(kinds) == {"chain_sum": 20, "leg_counting": 10}
    assert kinds[:3].count("chain_sum") == 2  # spread, not one after the other
    sums = [e for e in examples if e.columns["dataset"] == "chain_sum"]
    terms = [len(re.findall(r"\d+", e.prompt.partition(":")[2])) for e in sums]
    most = [e.columns["dataset_arguments"]["max_terms"] for e in sums]
    assert most == sorted(most) and set(most) == {2, 3, 4} and all(x <= y for x, y in zip(terms, most, strict=True))
    given = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
    right = [str(answer) for answer in given["answer"]]
    assert gym.reward([None] * 30, right, **given) == [1.0] * 30
    for arguments, named in (
        ({}, ("prompts.arguments", {}, "prompts.name='mix'")),
        ({"chain_sum": 3}, ("prompts.arguments.chain_sum", 3)),
        ({"chain_sum": {"weight": 0}}, ("prompts.arguments.chain_sum", {"weight": 0})),
        ({"chain_sums": {}}, ("prompts.name", "chain_sums", "mean chain_sum")),
        ({"chain_sums": {"levels": 2}}, ("prompts.name", "chain_sums", "mean chain_sum")),
        ({"chain_sum": {"levels": 0}}, ("prompts.arguments.levels", 0)),
        ({"chain_sum": {"levels": 12}}, ("prompts.arguments.levels", 12, "11", "chain_sum")),
    ):
        with refused(*named):
            tasks.load(dataclasses.replace(config, arguments=arguments), seed=0)
