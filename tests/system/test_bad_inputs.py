"""Bad input gives one line on stderr with its name and the allowed values, exit status 2, and nothing was compiled."""

import contextlib
import json
import os
import subprocess
import sys
import time

import jax
import pytest
from support import command_line, refusal
from support.command_line import DEBUG_CONFIG
from support.refusal import check_refusal

from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.runtime import row_files
from jaxrl_llm.runtime.checkpoint import claim
from jaxrl_llm.runtime.json_lines import objects
from jaxrl_llm.runtime.weights import check_workdir

FUNCTIONS = DEBUG_CONFIG.parents[1] / "tests" / "fixtures" / "reward_functions.py"
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def refused(monkeypatch, capfd):
    """Run a command that must refuse its input, and return its one line on stderr."""

    def compiles(*_):
        raise AssertionError("compiled before the input was checked")

    for command in ("evaluate", "generate", "score", "serve", "sft", "train"):
        monkeypatch.setattr(f"jaxrl_llm.commands.{command}.compile_all", compiles)
    events = []
    # But for a number of optax's, which the first test of a process to come to its state makes an array of.
    number = "jit(convert_element_type)"
    listener = lambda event, duration, fun_name="", **_: events.append(event) if fun_name != number else None
    jax.monitoring.register_event_duration_secs_listener(listener)

    def run(name, *arguments):
        events.clear()
        done = command_line.run_command(name, *arguments, monkeypatch=monkeypatch, capfd=capfd)
        assert COMPILE_EVENT not in events
        return one_line(done.status, done.err)

    yield run
    jax.monitoring.unregister_event_duration_listener(listener)


def one_line(status, err):
    lines = err.splitlines()
    assert status == 2 and len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


def train_arguments(tmp_path, *overrides):
    return [f"--config={DEBUG_CONFIG}", f"--workdir={tmp_path / 'run'}", *(f"--config.{o}" for o in overrides)]


def write(path, text):
    path.write_text(text)
    return path


# ---- the ten ---------------------------------------------------------------------------------------------------


def missing_file(tmp_path):
    overrides = ["prompts.source=jsonl", f"prompts.name={tmp_path / 'none.jsonl'}"]
    return overrides, ["prompts.name=", "none.jsonl", "No such file"]


def broken_json_line(tmp_path):
    path = write(tmp_path / "questions.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n')
    return ["prompts.source=jsonl", f"prompts.name={path}"], [f"{path}:2:", "not JSON", "prompts.bad_row='skip'"]


def empty_dataset(tmp_path):
    path = write(tmp_path / "questions.jsonl", "\n")
    return ["prompts.source=jsonl", f"prompts.name={path}"], [str(path), "holds no question", "empty"]


def unknown_config_key(tmp_path):
    return ["rollout.group_sise=4"], ["group_sise", "group_size"]


def group_of_one(tmp_path):
    return ["rollout.group_size=1"], ["rollout.group_size=1", "at least 2"]


def capacity_below_batch(tmp_path):
    overrides = ["replay.capacity=64", "update.batch_size=128", "update.micro_batch_size=64"]
    return overrides, ["replay.capacity=64", "at least update.batch_size=128"]


def micro_batch_not_dividing(tmp_path):
    return ["update.micro_batch_size=24"], ["update.micro_batch_size=24", "must divide update.batch_size=64"]


def prompt_too_long(tmp_path):
    overrides = ["prompts.max_tokens=16"]
    return overrides, ["letters:1", "prompt of 21 tokens", "prompts.max_tokens=16", "prompts.long_prompt='skip'"]


def unreadable_weights(tmp_path):
    path = write(tmp_path / "model.gguf", "these are not weights")
    return [f"model.path={path}"], [str(path), "GGUF"]


def mesh_of_other_devices(tmp_path):
    return ["mesh.data=3"], ["mesh.data=3", f"must use all {jax.device_count()} devices"]


TEN = [
    missing_file,
    broken_json_line,
    empty_dataset,
    unknown_config_key,
    group_of_one,
    capacity_below_batch,
    micro_batch_not_dividing,
    prompt_too_long,
    unreadable_weights,
    mesh_of_other_devices,
]


@pytest.mark.parametrize("case", TEN, ids=lambda case: case.__name__)
def test_ten_bad_inputs(case, tmp_path, refused):
    overrides, named = case(tmp_path)
    line = refused("train", *train_arguments(tmp_path, *overrides))
    for part in named:
        assert part in line, line


def test_a_bad_input_in_a_process_of_its_own(tmp_path):
    """The last check depends on jax's report of the devices."""
    overrides, named = mesh_of_other_devices(tmp_path)
    command = [sys.executable, "-m", "jaxrl_llm.train", *train_arguments(tmp_path, *overrides)]
    flags = f"--xla_force_host_platform_device_count={jax.device_count()}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    line = one_line(done.returncode, done.stderr)
    assert done.stdout == "" and all(part in line for part in named), line


# ---- questions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (r'{"prompt": "a\udc00b"}', [":1: ", "half a surrogate pair", "prompts.bad_row='skip'"]),
        (json.dumps({"prompt": "a b " * 250_000}), [":1: prompt of 1000000 tokens is over prompts.max_tokens=32"]),
        ('{"prompt": "a", "x": ' + "[" * 900 + "]" * 900 + "}", [":1: not JSON: nested too deeply"]),
        ('{"prompt": "a", "prompt": "b"}', [":1: key 'prompt' occurs twice in an object"]),
    ],
    ids=["surrogate", "megabyte", "deep", "twice"],
)
def test_questions_that_are_none(text, named, tmp_path, refused):
    path = write(tmp_path / "q.jsonl", text)
    start = time.monotonic()
    overrides = ["prompts.source=jsonl", f"prompts.name={path}", "eval.num_prompts=0"]
    line = refused("train", *train_arguments(tmp_path, *overrides))
    assert str(path) in line and all(part in line for part in named)
    assert len(line) < 400 and time.monotonic() - start < 60  # measured: a second


@pytest.mark.parametrize("source", ["jsonl", "parquet", "external", "generate", "score"])
def test_a_pipe_is_refused_and_not_waited_for(source, tmp_path, refused):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    if source in ("generate", "score"):
        flag = {"generate": "prompts", "score": "input"}[source]
        line = refused(source, "--model=random:debug", f"--{flag}={path}", f"--output={tmp_path / 'out.jsonl'}")
    elif source == "external":
        overrides = [f"external.paths=('{path}',)", "external.groups_per_iteration=8"]
        line = refused("train", *train_arguments(tmp_path, *overrides))
    else:
        pytest.importorskip("pyarrow")
        line = refused("train", *train_arguments(tmp_path, f"prompts.source={source}", f"prompts.name={path}"))
    assert str(path) in line and "must be a regular file" in line


def test_a_system_prompt_of_bytes_that_are_no_text(tmp_path, refused):
    shell = b"\xff".decode("utf-8", "surrogateescape")  # what Python makes of such an argument
    line = refused("train", *train_arguments(tmp_path, f"prompts.system_prompt={shell}"))
    assert "prompts.system_prompt='\\udcff' must be printable text" in line


# ---- weights ---------------------------------------------------------------------------------------------------


def debug_folder(path):
    """Return a Hugging Face folder of the debug preset without its weights."""
    from jaxrl_llm.models.files.gguf import make_byte_tokenizer

    arch = PRESETS["debug"]
    path.mkdir()
    make_byte_tokenizer().save(path)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.width,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "intermediate_size": arch.ffn,
        "tie_word_embeddings": True,
        "max_position_embeddings": arch.max_positions,
    }
    (path / "config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "model.safetensors"),
        (b"", "model.safetensors"),
        (b"\xff" * 64, "model.safetensors"),
        ((100).to_bytes(8, "little") + b"{" * 50, "model.safetensors"),
    ],
    ids=["missing", "empty", "garbage", "cut_short"],
)
def test_unreadable_safetensors(content, named, tmp_path, refused):
    folder = debug_folder(tmp_path / "model")
    if content is not None:
        (folder / "model.safetensors").write_bytes(content)
    line = refused("train", *train_arguments(tmp_path, f"model.path={folder}"))
    assert str(folder) in line and named in line


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("random:huge", "random:debug"),
        ("no/such/folder/here", "allowed: a Hugging Face folder"),
        ("none.gguf", "no such file"),
        ("", "allowed: a Hugging Face folder"),
    ],
)
def test_a_model_that_is_not_there(path, named, tmp_path, refused):
    line = refused("train", *train_arguments(tmp_path, f"model.path={path}"))
    assert f"model.path={path!r}" in line and named in line


def test_answers_of_others_are_checked_before_anything_is_compiled(tmp_path, refused):
    rows = '{"prompt": "a", "completions": ["a", "b"]}\n{"prompt": "a", "completions": ["a", "123456789"]}\n'
    path = write(tmp_path / "shown.jsonl", rows)
    overrides = [f"external.paths=('{path}',)", "external.groups_per_iteration=8"]
    line = refused("train", *train_arguments(tmp_path, *overrides))
    check_refusal(line, "sampling.max_completion_tokens", 8, f"{path}:2", "completions[1]", "10 tokens")
    line = refused(
        "train", *train_arguments(tmp_path, overrides[0], "external.groups_per_iteration=1", "replay.capacity=144")
    )
    assert "external.groups_per_iteration=1 must be a multiple of 8" in line


# ---- flags and the config file -----------------------------------------------------------------------------------


def test_unknown_flag(tmp_path, refused):
    line = refused("train", *train_arguments(tmp_path), "--wrkdir=x")
    assert "wrkdir" in line and "Did you mean: workdir" in line


def test_required_flags(tmp_path, refused):
    assert "--config" in refused("train", f"--workdir={tmp_path}")
    assert "--workdir" in refused("train", f"--config={DEBUG_CONFIG}")


def test_config_file_that_is_not_there(tmp_path, refused):
    path = tmp_path / "none.py"
    assert str(path) in refused("train", f"--config={path}", f"--workdir={tmp_path}")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("def get_config(:\n", "my_config.py: SyntaxError: invalid syntax"),
        ("x = 1\n", "get_config"),
        ("def get_config():\n    raise KeyError('no such thing')\n", "my_config.py:2: KeyError: 'no such thing'"),
        ("import no_such_module\n", "no_such_module"),
        ("def get_config():\n    return 3\n", "config=3 must be a group of settings"),
        (
            "from jaxrl_llm.config import defaults\ndef get_config():\n    c = defaults()\n"
            "    c.rollout.group_sise = 4\n    return c\n",
            "group_sise",
        ),
    ],
    ids=["syntax", "no_get_config", "raises", "import", "returns_a_number", "unknown_key"],
)
def test_config_file_that_is_none(text, named, tmp_path, refused):
    path = write(tmp_path / "my_config.py", text)
    line = refused("train", f"--config={path}", f"--workdir={tmp_path / 'run'}")
    assert named in line


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rollout.group_size=four", ["rollout.group_size", "four"]),
        ("rollout.group_size=4.5", ["rollout.group_size", "4.5"]),
        ("algorithm.advantage=none", ["algorithm.advantage='none'", "'leave_one_out'"]),
        ("algorithm.surrogate=cipso", ["algorithm.surrogate='cipso' is not one of 'clipped', ", "'cispo'"]),
        ("algorithm.surrogate.hihg=0.3", ["algorithm.surrogate.hihg='0.3' of 'clipped'", "did you mean high"]),
        ("algorithm.surrogate.high=wide", ["algorithm.surrogate.high='wide' must be of type float"]),
        ("algorithm.surrogate.low=2", ["algorithm.surrogate.low=2.0 must be at least 0.0 and at most 1.0"]),
        ("algorithm.reward_terms=length", ["algorithm.reward_terms[0]='length' is not one of", "'length_reward'"]),
        ("algorithm.divergence.coefficient=0.1", ["algorithm.divergence.coefficient='0.1'", "'none'"]),
        ("algorithm.surrogate=none.py:f", ["algorithm.surrogate='none.py:f' cannot be used", "no file"]),
        (
            "algorithm.correction=importance",
            ["algorithm.correction='importance'", "'none'", "algorithm.surrogate='clipped'"],
        ),
        ("optimizer.learning_rate=-1", ["optimizer.learning_rate=-1.0", "at least 0"]),
        ("sampling.temperature=nan", ["sampling.temperature=nan"]),
        ("rewards.functions=('none.py:f',)", ["rewards.functions", "none.py"]),
        ("rewards.functions=('nosuch:f',)", ["rewards.functions='nosuch:f' cannot be used: ModuleNotFoundError"]),
        ("rewards.functions=('/tmp:f',)", ["rewards.functions='/tmp:f' cannot be used: ModuleNotFoundError"]),
        ("rollout.prompts_per_iteration=4", ["rollout.prompts_per_iteration=4", "multiple of 8"]),
        ("sampling.temperature=0", ["sampling.temperature=0.0"]),
        ("sampling.stop_strings=('a<|eos|>',)", ["sampling.stop_strings='a<|eos|>'", "sampling.stop_tokens"]),
    ],
)
def test_settings_that_cannot_be(override, named, tmp_path, refused):
    line = refused("train", *train_arguments(tmp_path, override))
    assert all(part in line for part in named), line


@pytest.mark.parametrize(
    ("name", "argument"), [("no_columns", "allowed"), ("wants_solution", "solution"), ("only_completions", "prompts")]
)
def test_a_reward_function_that_does_not_take_the_columns(name, argument, tmp_path, refused):
    override = f"rewards.functions=('{FUNCTIONS}:{name}',)"
    evaluation = [f"--config={DEBUG_CONFIG}", "--model=random:debug", f"--config.{override}"]
    for line in (refused("train", *train_arguments(tmp_path, override)), refused("evaluate", *evaluation)):
        assert f"{name}' cannot score letters:" in line and f"'{argument}'" in line
        assert ": prompts, completions, allowed" in line


def test_a_workdir_that_is_a_file_or_in_one(tmp_path, refused):
    path = write(tmp_path / "file", "")
    for workdir, why in ((path, "File exists"), (path / "run", "Not a directory")):
        line = refused("train", f"--config={DEBUG_CONFIG}", f"--workdir={workdir}")
        assert line == f"error: --workdir={workdir} cannot be written: {why}"


@pytest.fixture(params=["a folder", "the folder above"])
def read_only(request, tmp_path):
    """Return a workdir that cannot be written or created; for root, a disk that is mounted read-only."""
    folder = tmp_path / "disk"
    workdir = folder / "run"
    (workdir if request.param == "a folder" else folder).mkdir(parents=True)
    if os.getuid() != 0:
        (workdir if workdir.exists() else folder).chmod(0o555)
        yield workdir, "Permission denied"
        return
    bind = subprocess.run(["mount", "--bind", folder, folder], capture_output=True, check=False)
    if bind.returncode != 0:
        pytest.skip("root may not mount here, and permissions do not bind root")
    subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
    yield workdir, "Read-only file system"
    subprocess.run(["umount", folder], check=True)


def test_a_workdir_that_cannot_be_written(read_only, monkeypatch, capfd):
    workdir, why = read_only
    flags = f"--config={DEBUG_CONFIG}", f"--workdir={workdir}"
    done = command_line.run_command("train", *flags, monkeypatch=monkeypatch, capfd=capfd)
    status = 1 if why == "Read-only file system" else 2  # a disk that is so after a fault is another one's elsewhere
    assert (done.status, done.err) == (status, f"error: --workdir={workdir} cannot be written: {why}\n")


def test_a_workdir_that_another_run_holds(tmp_path, refused):
    with claim(tmp_path):
        line = refused("train", f"--config={DEBUG_CONFIG}", f"--workdir={tmp_path}")
    assert (
        line.startswith(f"error: --workdir={tmp_path} is in use by process {os.getpid()} on ") and " since 20" in line
    )


def test_a_workdir_with_files_of_something_else_is_refused_and_left_as_it_is(tmp_path, refused):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    line = refused("train", f"--config={DEBUG_CONFIG}", f"--workdir={tmp_path}")
    assert line.startswith(f"error: --workdir='{tmp_path}' must be") and "config.json" in line
    assert [x.name for x in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, ""),
        ({"lock": "process 1", "log.txt": "a", "questions.jsonl": "{}", "metrics.jsonl": ""}, ""),
        *[({"config.json": text, "metrics.jsonl": "{}"}, "") for text in ("", '{\n  "algor', '{"made_with": {}}')],
        ({"config.json": "{}"}, "config.json"),
        ({"config.json": "[1]", "metrics.jsonl": "{}"}, "config.json"),
        ({"config.json": '{"made_with": {}}', "model-1.safetensors": "a"}, "model-1.safetensors"),
        ({"adapter_config.json": "{}"}, "adapter_config.json"),
        ({"samples.jsonl": "{}"}, "samples.jsonl"),
        ({"metrics.jsonl": "{}", "log.txt": ""}, "metrics.jsonl"),
        ({"report.html": "mine"}, "report.html"),
        ({"after.json": "{}"}, "after.json"),
    ],
)
def test_a_workdir_is_new_or_a_run_s_whenever_that_was_killed(files, named, tmp_path):
    check_workdir(tmp_path / "new")
    for name, text in files.items():
        write(tmp_path / name, text)
    with refusal.refused("--workdir", str(tmp_path), named) if named else contextlib.nullcontext():
        check_workdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [("a[b]", "must be without '['"), ("caf\udce9", "in printable text"), ("a\nb", "in printable text")],
)
def test_a_workdir_whose_name_checkpoints_could_not_be_read_back_from(name, why, tmp_path, refused):
    line = refused("train", f"--config={DEBUG_CONFIG}", f"--workdir={tmp_path / name}")
    assert repr(str(tmp_path / name)) in line and why in line
    assert not (tmp_path / name).exists()


# ---- the other commands ------------------------------------------------------------------------------------------

NO_ROW = [
    ("", "the file has no row"),
    ('{"prompt": "a"}\n{"prompt\n', ":2: not JSON"),
    ("[1]\n", ":1: must be an object"),
]
NO_PROMPT = [
    *NO_ROW,
    ('{"prompt": ""}\n', ":1: "),
    ('{"text": "a"}\n', "`prompt_ids`"),
    ('{"messages": []}\n', ":1: "),
    ('{"messages": [{"role": "user"}]}\n', ":1: "),
    ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "nothing is left to answer"),
    ('{"prompt": "a", "messages": []}\n', "must have one of `prompt` and `messages`"),
    ('{"prompt": "\\ud800"}\n', ":1: without `prompt_ids`: '\\ud800' has half a surrogate pair"),
    ('{"prompt": "a", "prompt": "b"}\n', ":1: key 'prompt' occurs twice in an object"),
    ("[" * 100_000, ":1: not JSON: nested too deeply"),
    ("\x00\n", ":1: not JSON"),
    ('{"prompt_ids": []}\n', "at least 1 token"),
    ('{"prompt_ids": [1, 260]}\n', "token id 260 is not in the model's vocabulary 0..259"),
    ('{"prompt_ids": "12"}\n', "list of token ids"),
    (json.dumps({"prompt": "x" * 2040}) + "\n", "2048 positions"),
]
NO_COMPLETION = [
    *NO_ROW,
    ('{"prompt_ids": [1]}\n', "`completion_ids`"),
    ('{"prompt_ids": [], "completion_ids": [1]}\n', "`prompt_ids`"),
    ('{"prompt_ids": [1], "completion_ids": [-1]}\n', "token id -1"),
    ('{"prompt_ids": [1], "completion_ids": [1.5]}\n', "list of token ids"),
]


@pytest.mark.parametrize(
    ("command", "flag", "text", "named"),
    [("generate", "prompts", *case) for case in NO_PROMPT] + [("score", "input", *case) for case in NO_COMPLETION],
)
def test_rows_that_are_none_are_refused_with_their_line(command, flag, text, named, tmp_path, refused):
    path = write(tmp_path / "rows.jsonl", text)
    line = refused(command, "--model=random:debug", f"--{flag}={path}", f"--output={tmp_path / 'out.jsonl'}")
    assert str(path) in line and named in line


def test_rows_are_cut_at_line_ends_alone(tmp_path):
    texts = ["a\u2028b\x85c\x0bd\x1ee", "\ufeff", "f"]  # what str.splitlines takes for line ends, and a mark
    path = tmp_path / "rows.jsonl"
    made = [{"prompt": text, "_line": 3} for text in texts]
    path.write_text("\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in made), encoding="utf-8")
    assert objects(str(path)) == [(f"{path}:{number}", row) for number, row in zip((1, 3, 5), made, strict=True)]
    row_files.write(str(path), made)
    assert [row for _, row in objects(str(path))] == made


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--temperature=-1", ["temperature=-1"]),
        ("--temperature=0", ["--temperature=0", "0.01", "--greedy"]),
        ("--top_p=0", ["top_p=0"]),
        ("--max_tokens=0", ["max_completion_tokens=0"]),
        ("--batch_size=0", ["--batch_size=0", "at least 1"]),
        ("--compute_dtype=float64", ["compute_dtype='float64'", "'bfloat16'"]),
        ("--stop=<|pad|>", ["--stop='<|pad|>'", "--stop_token"]),
        ("--output=/no/such/folder/out.jsonl", ["/no/such/folder/out.jsonl"]),
    ],
)
def test_generate_refuses_bad_flags(flag, named, tmp_path, refused):
    path = write(tmp_path / "prompts.jsonl", '{"prompt": "a"}\n')
    output = f"--output={tmp_path / 'out.jsonl'}"
    line = refused("generate", "--model=random:debug", f"--prompts={path}", output, flag)
    assert all(part in line for part in named), line


def test_with_greedy_a_temperature_has_no_say(tmp_path, refused):
    path = write(tmp_path / "prompts.jsonl", '{"prompt": "a"}\n')
    words = ["--model=random:debug", f"--prompts={path}", "--output=/no/such/folder/out.jsonl", "--greedy"]
    assert "/no/such/folder/out.jsonl" in refused("generate", *words, "--temperature=0")


def test_serve_refuses_a_temperature_that_requests_may_not_have(refused):
    error = refused("serve", "--model=random:debug", "--temperature=0.005")
    check_refusal(error, "--temperature", 0.005, "0.01", "100")


def test_evaluate_wants_one_model(tmp_path, refused):
    config = f"--config={DEBUG_CONFIG}"
    both = "give one of --model=PATH and --checkpoint=DIR"
    assert both in refused("evaluate", config)
    assert both in refused("evaluate", config, "--model=random:debug", f"--checkpoint={tmp_path}")
    assert "--num_samples=0" in refused("evaluate", config, "--model=random:debug", "--num_samples=0")
    assert str(tmp_path) in refused("evaluate", config, f"--checkpoint={tmp_path}")


def test_export_and_report_want_a_run(tmp_path, refused):
    assert str(tmp_path) in refused("export", f"--checkpoint={tmp_path}", f"--output={tmp_path / 'hf'}")
    assert str(tmp_path) in refused("report", f"--workdir={tmp_path}")
