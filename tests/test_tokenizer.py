"""Tokenizers: prompts through chat templates, which ids end a turn, exact round trips."""

import json

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, make_bpe_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
PRINTABLE = [chr(byte) for byte in range(33, 127)]  # they stand for themselves; Ġ is the space and Ċ the newline


def make(chat_template=TEMPLATE, **settings):
    arguments = dict(
        tokens=[*SPECIAL, *PRINTABLE, "Ġ", "Ċ", "12", "Ġh", "Ġhi"],
        merges=[("1", "2"), ("Ġ", "h"), ("Ġh", "i")],
        special=SPECIAL,
        pre_tokenizer="gpt-2",
        chat_template=chat_template,
        bos="<s>",
        eos="</s>",
        pad=None,
    )
    return make_bpe_tokenizer(**{**arguments, **settings})


def ids_of(text):
    """Ids of text without merges."""
    return [4 + ord(c) - 33 if c not in " \n" else {" ": 98, "\n": 99}[c] for c in text]


def test_text_becomes_a_user_message_and_messages_stay():
    tokenizer = make()
    user = [2, *ids_of("user\nyo"), 3, 99]
    assistant = [2, *ids_of("assistant\n")]
    system = [2, *ids_of("system\nbe"), 3, 99]
    encode = tokenizer.encode_prompt
    assert encode("yo", chat_template=True, system_prompt="") == user + assistant
    assert encode("yo", chat_template=True, system_prompt="be") == system + user + assistant
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "yo"}]
    assert encode(messages, chat_template=True, system_prompt="") == system + user + assistant
    assert encode("yo", chat_template=False, system_prompt="") == ids_of("yo")


def test_merges_apply_in_order_and_digits_stand_alone_where_asked():
    assert make().encode("12 hi") == [100, 102]
    assert make(pre_tokenizer="smollm").encode("12 hi") == [*ids_of("12"), 102]


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "chat_template", "system_prompt", "message"),
    [
        (make(), [{"role": "user", "content": "x"}], False, "", "messages needs prompts.chat_template=True"),
        (make(), "x", False, "be", "prompts.system_prompt='be' needs prompts.chat_template=True"),
        (make(chat_template=None), "x", True, "", "has no chat template"),
        (make(chat_template="{{ raise_exception('no system') }}"), "x", True, "s", "refuses the messages .*no system"),
        (ByteTokenizer(), [{"role": "user", "content": "x"}], False, "", "messages needs prompts.chat_template=True"),
    ],
)
def test_prompts_that_cannot_be_encoded_name_the_setting(tokenizer, prompt, chat_template, system_prompt, message):
    with pytest.raises(ConfigError, match=message):
        tokenizer.encode_prompt(prompt, chat_template=chat_template, system_prompt=system_prompt)


def test_every_id_that_ends_a_turn_is_known(tmp_path):
    assert make().eos_ids == (1, 3)  # the tokenizer's own, and the template's end of turn
    assert make(chat_template=None).eos_ids == (1,)
    assert make(eos=None, chat_template=None).eos_ids == ()
    for stored, expected in [(0, (1, 0, 3)), ([3, 0], (1, 3, 0)), (None, (1, 3))]:
        make().save(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
        assert load_tokenizer(tmp_path).eos_ids == expected


def test_decode_hides_special_tokens_and_changes_nothing_else():
    tokenizer = make()
    text = "a , b . 's  x\n"
    ids = [2, *tokenizer.encode(text), 3]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.asarray(ids, np.int32)) == text
    assert tokenizer.decode_raw(ids) == f"<|im_start|>{text}<|im_end|>"


def test_a_saved_tokenizer_is_read_back_the_same(tmp_path):
    make().save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.vocab_size, again.eos_ids, again.bos_id, again.pad_id) == (103, (1, 3), 0, None)
    encoded = [t.encode_prompt("12 hi", chat_template=True, system_prompt="s") for t in (make(), again)]
    assert encoded[0] == encoded[1]


def test_unreadable_folders_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer.json: no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=f"{tmp_path}: its tokenizer cannot be read"):
        load_tokenizer(tmp_path)


def test_bytes_are_their_own_ids():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("hé\n") == [104, 195, 169, 10]
    assert tokenizer.decode([256, 104, 195, 169, 257, 259, 263]) == "hé"
    assert tokenizer.decode_raw([256, 104, 257]) == "<|bos|>h<|eos|>"
    assert tokenizer.decode([195]) == "\ufffd"
    assert tokenizer.encode_prompt("b", chat_template=True, system_prompt="a") == [97, 98]
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (260, (257,))


def test_a_saved_byte_tokenizer_is_the_same_map(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, Tokenizer)
    for name in ("vocab_size", "eos_ids", "bos_id", "pad_id"):
        assert getattr(again, name) == getattr(tokenizer, name), name
    text = "".join(map(chr, range(1, 500))) + "漢字🙂 's  \n"
    assert again.encode(text) == tokenizer.encode(text)
    for prompt in ("q", [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]):
        encoded = [t.encode_prompt(prompt, chat_template=True, system_prompt="s") for t in (tokenizer, again)]
        assert encoded[0] == encoded[1]
    random = np.random.default_rng(0)
    for _ in range(200):  # any bytes a random model may sample, valid UTF-8 or not
        ids = random.integers(0, 258, 12).tolist()
        assert again.decode(ids) == tokenizer.decode(ids)
        assert again.decode_raw(ids) == tokenizer.decode_raw(ids)
