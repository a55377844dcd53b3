"""Model folders and files from anybody: a fault gives a one-line error, no code in them runs, no other file is read."""

import json
import os
import pathlib
import pickle
import resource
import shutil
import signal
import struct

import numpy as np
import pytest
import safetensors.numpy
from support.refusal import raises_with
from test_gguf import write_tiny
from test_load_hf import TINY, edit_config, edit_weights, make_mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files import gguf, hf, pretrained, templates
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.files.tokenizer import load_tokenizer
from jaxrl_llm.models.transformer import Model


@pytest.fixture(autouse=True)
def bounds():
    """Limit each test to 4 GiB of additional memory and a minute.

    A model that takes more is a failure and does not end the test run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**32, hard))
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture
def tiny(tmp_path):
    return pathlib.Path(shutil.copytree(TINY, tmp_path / "model"))


def refused(load, *arguments, names):
    """Assert that ``load`` raises a one-line error with these names."""
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and all(name in line for name in names), line
    return line


def load(folder):
    return hf.load_params(folder, Model(hf.read_architecture(folder)), make_mesh())


# ---- config.json ---------------------------------------------------------------------------------------------------

SIZES = ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"]
SIZES += ["max_position_embeddings", "num_key_value_heads", "head_dim"]
NO_SIZE = ["576", -4, 0, [1], {}, 1.5, True, 2**40, 10**30]
NO_NUMBER = ["1", -1, 0, [1], {}, True, float("nan"), float("inf")]
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 1e4}


@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_is_none_names_its_key(key, tiny):
    for value in NO_SIZE + ([] if key in ("num_key_value_heads", "head_dim") else [None]):
        edit_config(tiny, **{key: value})
        refused(hf.read_architecture, tiny, names=[str(tiny / "config.json"), f"{key}={value!r}"])


@pytest.mark.parametrize("key", ["rms_norm_eps", *LLAMA3][:1] + [key for key in LLAMA3 if key != "rope_type"])
def test_a_number_that_is_none_names_its_key(key, tiny):
    for value in [*NO_NUMBER, None]:
        edit_config(tiny, **({key: value} if key == "rms_norm_eps" else {"rope_parameters": LLAMA3 | {key: value}}))
        refused(hf.read_architecture, tiny, names=[str(tiny / "config.json"), f"{key}={value!r}"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ({"rope_parameters": 3}, "rope_parameters=3"),
        ({"rope_parameters": {"rope_type": ["a"]}}, "rope_type=['a']"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "high_freq_factor - low_freq_factor=0.0"),
        ({"model_type": []}, "model_type=[]"),
        ({"num_key_value_heads": 3}, "4 heads, 3 key heads"),
        ({"head_dim": 11}, "key heads of size 11"),
    ],
)
def test_settings_that_do_not_fit_are_named(changes, named, tiny):
    edit_config(tiny, **changes)
    refused(hf.read_architecture, tiny, names=[named])


@pytest.mark.parametrize(
    "text", ["[]", "3", "null", '"x"', "[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}", "\ufeff{"]
)
def test_a_config_that_is_no_object_is_named(text, tiny):
    (tiny / "config.json").write_text(text)
    refused(hf.read_architecture, tiny, names=[str(tiny / "config.json")])


def test_code_that_comes_with_a_model_is_not_run(tiny, tmp_path):
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    make_byte_tokenizer().save(tiny)
    mine = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    (tiny / "evil.py").write_text(code)
    for file in ("config.json", "tokenizer_config.json"):
        settings = json.loads((tiny / file).read_text()) | {"auto_map": mine, "trust_remote_code": True}
        (tiny / file).write_text(json.dumps(settings | {"tokenizer_class": "EvilTokenizer"}))
    load(tiny)
    assert load_tokenizer(tiny).encode("a") == [97]
    edit_config(tiny, model_type="evil")
    refused(hf.read_architecture, tiny, names=["model_type='evil'"])
    assert not (tmp_path / "ran").exists()


# ---- weights -------------------------------------------------------------------------------------------------------


class Pickled:
    """An object that runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_pickles_are_not_opened(tiny, tmp_path):
    weights = pickle.dumps(Pickled(tmp_path / "ran"))
    (tiny / "model.safetensors").write_bytes(weights)
    refused(load, tiny, names=["model.safetensors: not a readable safetensors file"])
    (tiny / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pkl", "model.pt"):
        (tiny / name).write_bytes(weights)
    refused(load, tiny, names=["neither model.safetensors nor"])
    write_index(tiny, dict.fromkeys(["a"], "pytorch_model.bin"))
    refused(load, tiny, names=["pytorch_model.bin: not a readable safetensors file"])
    assert not (tmp_path / "ran").exists()


def write_header(path, header, data=b""):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 99 * 10**6) + b" " * 100,
        {name: {"dtype": "F32", "shape": [2], "data_offsets": [at, at + 8]} for name, at in (("a", 0), ("b", 4))},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F999", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
    ],
    ids=["header of 2^60", "header past the end", "overlap", "negative", "2^62", "2^64", "dtype", "backwards"],
)
def test_a_safetensors_header_that_lies_is_one_line(content, tiny):
    path = tiny / "model.safetensors"
    path.write_bytes(content) if isinstance(content, bytes) else write_header(path, content, b"\0" * 12)
    refused(load, tiny, names=[f"{path}: not a readable safetensors file"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_said(value, tiny):
    def spoil(tensors):
        weight = tensors["model.layers.1.mlp.up_proj.weight"].copy()
        weight[3, 1] = value
        return tensors | {"model.layers.1.mlp.up_proj.weight": weight}

    edit_weights(tiny, spoil)
    hf.check_weights(tiny, Model(hf.read_architecture(tiny)), make_mesh())  # of the headers alone
    refused(load, tiny, names=[str(tiny), "model.layers.1.mlp.up_proj.weight", "NaN"])


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def shards(tiny):
    """Return the tiny model in two files, and the file of each tensor. The index is not written yet."""
    tensors = safetensors.numpy.load_file(tiny / "model.safetensors")
    (tiny / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, held in parts.items():
        safetensors.numpy.save_file({name: tensors[name] for name in held}, tiny / file)
    return {name: file for file, held in parts.items() for name in held}


def test_an_index_reads_nothing_outside_its_folder(tiny, shards, tmp_path):
    """The second file is complete and outside the folder. No name in the index can reach it."""
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    shutil.move(tiny / "b.safetensors", outside / "b.safetensors")
    for name in ("../elsewhere/b.safetensors", str(outside / "b.safetensors"), "x/../../elsewhere/b.safetensors"):
        write_index(tiny, {tensor: file.replace("b.safetensors", name) for tensor, file in shards.items()})
        refused(load, tiny, names=[f"{tiny / 'b.safetensors'}: no such file"])
    for name in ("/etc/passwd", "../../../../etc/passwd", "/dev/zero", "/proc/self/environ"):
        write_index(tiny, shards | {"x": name})
        refused(load, tiny, names=["no such file"])
    shutil.move(outside / "b.safetensors", tiny / "b.safetensors")
    write_index(tiny, shards)
    load(tiny)


def test_files_that_are_links_are_followed_as_the_hubs_cache_needs(tiny, tmp_path):
    """The hub's cache is a folder of links to blobs.

    The target of a link must be weights; otherwise it is refused without quoting its text.
    """
    (tmp_path / "blob").write_bytes((tiny / "model.safetensors").read_bytes())
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors").symlink_to(tmp_path / "blob")
    load(tiny)
    (tmp_path / "blob").write_text("a secret of mine")
    assert "secret" not in refused(load, tiny, names=["not a readable safetensors file"])
    (tiny / "config.json").unlink()
    (tiny / "config.json").symlink_to(tmp_path / "blob")
    assert "secret" not in refused(hf.read_architecture, tiny, names=["not readable JSON"])


def test_shards_that_are_missing_doubled_or_no_files_are_named(tiny, shards):
    write_index(tiny, shards | {"x": "c.safetensors"})
    refused(load, tiny, names=["c.safetensors: no such file"])
    write_index(tiny, dict.fromkeys(shards, "a.safetensors"))
    refused(load, tiny, names=["is missing"])
    safetensors.numpy.save_file({"model.norm.weight": np.ones(32, np.float32)}, tiny / "c.safetensors")
    write_index(tiny, shards | {"x": "c.safetensors"})
    refused(load, tiny, names=["model.norm.weight is also stored in another file"])
    os.mkfifo(tiny / "pipe")  # would wait for ever
    for name in ("pipe", ".", "", "a\0b", "a" * 5000):
        write_index(tiny, shards | {"x": name})
        refused(load, tiny, names=["no such file"])
    for weight_map in ([1], {"a": 3}, {"a": None}, {"a": [1]}, None, "x"):
        write_index(tiny, weight_map)
        refused(load, tiny, names=["has no weight_map"])


# ---- tokenizers and chat templates -----------------------------------------------------------------------------------


@pytest.fixture
def words(tmp_path):
    """Return a folder with the files of the byte tokenizer."""
    (tmp_path / "words").mkdir()
    make_byte_tokenizer().save(tmp_path / "words")
    (tmp_path / "words" / "chat_template.jinja").unlink()
    return tmp_path / "words"


def set_template(folder, template):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


def encode(folder):
    return load_tokenizer(folder).encode_prompt("hello", chat_template=True, system_prompt="")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ raise_exception.__globals__['os'].system('touch ran') }}",
        "{{ cycler.__init__.__globals__.os.popen('touch ran').read() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as o %}{{ o.system('touch ran') }}",
        "{{ messages.append(3) }}",
        "{% for i in range(10**12) %}{% endfor %}",
        "{{ 'a' * 10**11 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% if %}",
        "{{ raise_exception('no\nway') }}",
        3,
        True,
        [{"name": "other", "template": "x"}],
    ],
)
def test_a_chat_template_reaches_nothing_and_is_refused_in_words(template, words, monkeypatch):
    monkeypatch.chdir(words)
    set_template(words, template)
    with raises_with(ConfigError, "chat template"):
        encode(words)
    assert not (words / "ran").exists()


def test_a_chat_template_that_loops_for_ever_is_ended(words, monkeypatch):
    monkeypatch.setattr(templates, "TEMPLATE_SECONDS", 0.3)
    loop = "{% for i in range(99999) %}"
    set_template(words, loop * 4 + "{% endfor %}" * 4)
    left = signal.getitimer(signal.ITIMER_REAL)[0]
    refused(encode, words, names=["refuses the messages", "the template runs for more than 0.3 s"])
    assert left - 5 < signal.getitimer(signal.ITIMER_REAL)[0] <= left  # the caller's own alarm is still set
    set_template(words, "{{ messages[0]['content'] }}")
    assert encode(words) == list(b"hello")


@pytest.mark.parametrize("value", ["2", -1, 10**30, 2.5, True, [1, "a"], [[1]], {"a": 1}])
def test_ends_of_text_that_are_no_ids_are_named(value, words):
    (words / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    refused(load_tokenizer, words, names=["generation_config.json: eos_token_id="])


@pytest.mark.parametrize("text", ["", "[1]", "[" * 200_000, "{", '{"added_tokens": 3}'])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_tokenizers_file_that_is_none_is_one_line(file, text, words):
    text = text if file == "tokenizer.json" else text.replace('{"added_tokens": 3}', "[]")
    (words / file).write_text(text)
    refused(load_tokenizer, words, names=[f"{words}: its tokenizer cannot be read"])


def test_a_tokenizer_must_fit_its_model(tiny):
    """The tiny model has 96 embeddings. A padding token beyond them is never read."""
    make_byte_tokenizer().save(tiny)
    refused(pretrained.resolve(str(tiny)).tokenizer, names=[str(tiny), "ids up to 259", "96 embeddings"])
    edit_config(tiny, vocab_size=260)
    assert pretrained.resolve(str(tiny)).tokenizer().eos_ids[0] == 257
    path = tiny / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))
    (tiny / "generation_config.json").unlink()
    edit_config(tiny, eos_token_id=[2, 260])
    refused(pretrained.resolve(str(tiny)).tokenizer, names=["end tokens (2, 260)", "260 embeddings"])
    edit_config(tiny, eos_token_id=None)
    refused(pretrained.resolve(str(tiny)).tokenizer, names=["end tokens ()"])


# ---- GGUF ----------------------------------------------------------------------------------------------------------


def text(value):
    return struct.pack("<Q", len(value)) + value


def gguf_header(num_tensors, num_keys, rest):
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


KEY, TENSOR = text(b"general.architecture"), text(b"token_embd.weight")
STRING, ARRAY = 8, 9
COUNTS = {
    "keys": lambda n: gguf_header(0, n, KEY + struct.pack("<I", 4) * 20),
    "tensors": lambda n: gguf_header(n, 0, TENSOR + b"\0" * 64),
    "letters of a key": lambda n: gguf_header(0, 1, struct.pack("<Q", n) + b"abc"),
    "letters of a value": lambda n: gguf_header(0, 1, KEY + struct.pack("<IQ", STRING, n) + b"llama"),
    **{
        f"items of type {kind}": lambda n, kind=kind: gguf_header(
            0, 1, KEY + struct.pack("<IIQ", ARRAY, kind, n) + b"\0" * 64
        )
        for kind in (0, 4, 6, STRING, ARRAY, 12, 99)
    },
    "dimensions": lambda n: gguf_header(1, 0, TENSOR + struct.pack("<I", min(n, 2**32 - 1)) + b"\0" * 64),
    "rows": lambda n: gguf_header(1, 0, TENSOR + struct.pack("<IQQIQ", 2, n, n, 0, 0) + b"\0" * 640),
    "columns": lambda n: gguf_header(1, 0, TENSOR + struct.pack("<IQIQ", 1, n, 0, 0) + b"\0" * 640),
    "offset": lambda n: gguf_header(1, 0, TENSOR + struct.pack("<IQIQ", 1, 4, 0, n) + b"\0" * 640),
}


@pytest.mark.parametrize("what", COUNTS)
def test_a_gguf_that_says_it_has_more_than_it_has_is_one_line(what, tmp_path):
    for count in (2**31, 2**60, 2**64 - 1):
        path = tmp_path / f"{count}.gguf"
        path.write_bytes(COUNTS[what](count))
        refused(gguf.read_architecture, path, names=[f"{path}: not a readable GGUF file"])


@pytest.mark.parametrize(
    "content",
    [
        gguf_header(0, 1, text(b"a") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 20_000),
        gguf_header(1, 0, TENSOR + struct.pack("<IQIQ", 1, 4, 999, 0) + b"\0" * 640),
        gguf_header(2, 0, (text(b"a") + struct.pack("<IQIQ", 1, 4, 0, 0)) * 2 + b"\0" * 640),
        gguf_header(0, 1, text(b"\xff\xfe") + struct.pack("<II", 4, 1)),
        gguf_header(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 0)),
        gguf_header(0, 1, text(b"general.alignment") + struct.pack("<I", STRING) + text(b"x")),
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    ],
    ids=["lists in lists", "no such type", "twice", "latin", "alignment 0", "alignment x", "version 99"],
)
def test_a_gguf_whose_header_makes_no_sense_is_one_line(content, tmp_path):
    (tmp_path / "x.gguf").write_bytes(content)
    refused(gguf.read_architecture, tmp_path / "x.gguf", names=["x.gguf: not a readable GGUF file"])


def test_a_gguf_cut_anywhere_is_one_line(tmp_path):
    whole = write_tiny(tmp_path / "whole.gguf").read_bytes()
    for end in [*range(0, 64, 7), *range(64, len(whole), 4099)]:
        path = tmp_path / f"{end}.gguf"
        path.write_bytes(whole[:end])
        refused(gguf.read_architecture, path, names=[f"{path}: not a readable GGUF file"])


def with_metadata(path, **values):
    """Write the tiny model with other metadata {name: (writer's method, value)}; __ in a name means a dot."""

    def change(writer, tensors):
        for key, (method, value) in values.items():
            key = key.replace("__", ".")
            for kept in writer.kv_data:
                kept.pop(key, None)
            getattr(writer, method)(key, value)

    return write_tiny(path, change=change)


@pytest.mark.parametrize(
    "key",
    [
        *("embedding_length", "block_count", "feed_forward_length", "context_length", "attention.head_count"),
        *("attention.head_count_kv", "attention.key_length", "rope.freq_base", "attention.layer_norm_rms_epsilon"),
    ],
)
def test_metadata_that_is_no_number_names_its_key(key, tmp_path):
    bad = [("add_string", "576"), ("add_int32", -4), ("add_uint32", 0), ("add_array", [1, 2]), ("add_bool", True)]
    for method, value in [*bad, ("add_float32", float("nan")), ("add_uint64", 2**62)]:
        path = with_metadata(tmp_path / "x.gguf", **{f"llama.{key}": (method, value)})
        os.utime(path, ns=(0, hash((key, method)) % 10**9))  # one file, read anew each time
        refused(gguf.read_architecture, path, names=[f"{path}: llama.{key}={value!r}"])


TOKENS = {
    "tokenizer.ggml.model": ("add_string", "gpt2"),
    "tokenizer.ggml.pre": ("add_string", "smollm"),
    "tokenizer.ggml.tokens": ("add_array", ["a", "b", "ab"]),
    "tokenizer.ggml.token_type": ("add_array", [1, 1, 3]),
    "tokenizer.ggml.merges": ("add_array", ["a b"]),
    "tokenizer.ggml.eos_token_id": ("add_uint32", 2),
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", ("add_uint32", 99)),
        ("eos_token_id", ("add_string", "a")),
        ("token_type", ("add_array", [1])),
        ("tokens", ("add_array", [1, 2, 3])),
        ("tokens", ("add_string", "abc")),
        ("tokens", ("add_array", ["a", "a", "ab"])),
        ("merges", ("add_array", ["nospace"])),
        ("merges", ("add_array", ["a x"])),
        ("merges", ("add_array", ["b a"])),  # its token is in no list: the library would end the thread
        ("merges", ("add_uint32", 3)),
        ("pre", ("add_array", ["smollm"])),
        ("model", ("add_array", ["gpt2"])),
        ("model", ("add_string", "llama")),  # which needs scores
        ("token_type", ("add_array", [1, 1, 5])),  # the end of a text, and what the merge makes, is no token
        ("add_bos_token", ("add_bool", True)),  # and names none
        ("add_bos_token", ("add_string", "no")),
        ("add_eos_token", ("add_uint32", 1)),
    ],
)
def test_a_ggufs_tokenizer_whose_parts_do_not_fit_is_one_line(key, value, tmp_path):
    path = with_metadata(tmp_path / "x.gguf", **TOKENS | {f"tokenizer.ggml.{key}": value})
    refused(gguf.read_tokenizer, path, names=[f"{path}: "])
    good = with_metadata(tmp_path / "good.gguf", **TOKENS)
    assert gguf.read_tokenizer(good).encode("ab", special_tokens=True) == [2]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scores", ("add_array", [1.0])),
        ("scores", ("add_array", ["a", "b", "c"])),
        ("scores", ("add_float32", 1.0)),
        ("unknown_token_id", ("add_uint32", 99)),
        ("add_space_prefix", ("add_uint32", 1)),
    ],
)
def test_scores_of_a_gguf_that_do_not_fit_are_one_line(key, value, tmp_path):
    scored = {"tokenizer.ggml.model": ("add_string", "llama"), "tokenizer.ggml.scores": ("add_array", [0.0, -1.0, 2.0])}
    scored = TOKENS | scored | {"tokenizer.ggml.add_bos_token": ("add_bool", False)}
    path = with_metadata(tmp_path / "x.gguf", **scored | {f"tokenizer.ggml.{key}": value})
    refused(gguf.read_tokenizer, path, names=[f"{path}: "])
    good = with_metadata(tmp_path / "good.gguf", **scored)
    assert gguf.read_tokenizer(good).encode("ab", special_tokens=True) == [2]


def test_a_ggufs_weights_that_are_no_numbers_are_said(tmp_path):
    def spoil(writer, tensors):
        tensors["output_norm.weight"] = np.where(np.arange(32) == 5, np.nan, 1).astype(np.float32)

    path = write_tiny(tmp_path / "x.gguf", change=spoil)
    refused(
        lambda: gguf.load_params(path, Model(gguf.read_architecture(path)), make_mesh()),
        names=[str(path), "output_norm.weight", "NaN"],
    )
