"""One question has one id, and one memory that survives a checkpoint."""

import json

import numpy as np

from jaxrl_llm.config import PromptsConfig
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.questions.ledger import Ledger
from jaxrl_llm.questions.stream import PromptStream, encode_examples
from jaxrl_llm.types import Example


def test_a_question_is_its_tokens_whoever_asks_it():
    ledger = Ledger()
    ids = [ledger.question_id(tokens) for tokens in ([1, 2], [2, 1], np.array([1, 2], np.int32), [1, 2, 0], [1], [])]
    assert ids == [0, 1, 0, 2, 3, 4]


def test_copies_in_the_data_are_one_question_and_retire_together():
    examples = [Example(text, {}, "") for text in ("a", "b", "a", "c")]
    config = PromptsConfig(max_tokens=6, chat_template=False, shuffle=False, retire_pass_rate=0.5)
    ledger = Ledger()
    stream = PromptStream(encode_examples(examples, make_byte_tokenizer(), config)[0], config, ledger, seed=0)
    assert [stream.question_id(i) for i in range(8)] == [0, 1, 0, 2] * 2
    assert ledger.question_id([ord("b")]) == 1  # another's answer to one of them
    # The first copy: 1 of 2 right; the second: 0 of 1. Together 1 of 3, under the rate, until one more is right.
    ledger.observe([0, 0], np.array([True, False]), np.array([True, True]))
    assert stream.retired() == {0} and [e.prompt for e in stream.next_batch(3).examples] == ["b", "c", "b"]
    ledger.observe([0], np.array([False]), np.array([True]))
    assert stream.retired() == set() and ledger.answers(0) == (1, 3)
    ledger.observe([0, 1, 2], np.array([True] * 3), np.array([True, False, True]))
    assert stream.retired() == {0, 2} and ledger.answers(1) == (0, 0)


def test_what_is_known_survives_a_checkpoint():
    def of_data():
        ledger = Ledger()
        for tokens in ([1], [2]):
            ledger.question_id(tokens)
        ledger.close_data()
        return ledger

    ledger, resumed = of_data(), of_data()
    assert ledger.question_id([7]) == 2 and ledger.question_id([8]) == 3
    ledger.observe([3, 1], np.array([True, True, False, True]), np.ones(4, bool))
    ledger.numbers("counts")[3] = 0.25, 2.0
    numbers = resumed.numbers("counts")  # as a method takes them, before the checkpoint is read
    resumed.restore(json.loads(json.dumps(ledger.state())))
    assert numbers == {3: (0.25, 2.0)} == ledger.numbers("counts")
    assert [resumed.question_id([n]) for n in (8, 7, 9)] == [3, 2, 4]
    assert resumed.answers(3) == (2, 2) and resumed.answers(1) == (1, 2)
    assert resumed.state()["others"][:2] == ledger.state()["others"]
