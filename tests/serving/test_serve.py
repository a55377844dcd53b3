"""The server with real sockets and a tiny model.

Tokens and log-probs are the model's own, whatever other requests run.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest
import safetensors.numpy
from support.building import ONE, mesh_of
from support.refusal import check_refusal, check_words, raises_with, refused

from jaxrl_llm.commands.serve import adapters_of, server_of
from jaxrl_llm.config import ConfigError, LoraConfig, SamplingConfig
from jaxrl_llm.models import lora
from jaxrl_llm.models.architecture import PRESETS
from jaxrl_llm.models.files import hf, peft, pretrained
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.row_logp import row_logp
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import sharding

MODEL, MOST, WIDTH = "random:debug", 24, 48


@contextlib.contextmanager
def serving(**settings):
    given = {"temperature": 1.0, "slots": 4, "max_waiting": 300, "token": ""} | settings
    sampling = SamplingConfig(temperature=given.pop("temperature"), max_completion_tokens=MOST)
    server = server_of(MODEL, given.pop("adapters", None), sampling=sampling, max_prompt_tokens=WIDTH, **given)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        for engine in server.engines.values():
            engine.close()
            assert engine.error is None


def engine_of(server):
    return server.engines[MODEL]


@pytest.fixture(scope="module", autouse=True)
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        mesh = mesh_of(ONE)
        patch.setattr(sharding, "make_mesh", lambda *_: mesh)
        yield


@pytest.fixture(scope="module")
def sampled(one_device):
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def greedy(one_device):
    with serving(temperature=0.0) as server:
        yield server


def ask(server, path, body, *, method="POST", token=""):
    """Send a request. Return (status, answer)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    data = body if isinstance(body, (str, bytes)) else json.dumps(body)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request(method, path, data if method == "POST" else None, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text)


def generate(server, ids, model=MODEL, **params):
    body = {"token_ids": ids, "sampling_params": params, "model": model}
    status, answer = ask(server, "/inference/v1/generate", body)
    assert status == 200 and answer["model"] == model, answer
    (choice,) = answer["choices"]
    return choice["token_ids"], [x["logprob"] for x in choice["logprobs"]["content"]], choice["finish_reason"]


@functools.cache
def learner(adapter="", temperature=1.0):
    source = pretrained.resolve(MODEL, adapter=adapter)
    model = Model(source.architecture())
    params = source.load_params(model, mesh_of(ONE), seed=0)
    how = {"sampling": SamplingConfig(temperature=temperature), "completion_width": MOST, "chunk_positions": 8}
    return jax.jit(functools.partial(row_logp, model, params, **how))


def own_logp(prompt, completion, adapter="", temperature=1.0):
    row = np.zeros((1, WIDTH + MOST), np.int32)
    row[0, : len(prompt) + len(completion)] = prompt + completion
    sizes = np.array([len(prompt)], np.int32), np.array([len(prompt) + len(completion)], np.int32)
    return np.asarray(learner(adapter, temperature)(row, *sizes).logp)[0, len(prompt) : sizes[1][0]]


def test_tokens_of_many_at_once_have_the_log_probs_that_the_model_gives_them_after_their_own_prompt(sampled):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 250, rng.integers(1, WIDTH + 1)).tolist() for _ in range(14)]
    sizes = [int(x) for x in rng.integers(1, MOST + 1, 14)]
    with concurrent.futures.ThreadPoolExecutor(14) as pool:
        answers = list(pool.map(lambda p, n: generate(sampled, p, max_tokens=n, logprobs=0), prompts, sizes))
    for prompt, size, (tokens, logps, why) in zip(prompts, sizes, answers, strict=True):
        assert why == ("length" if tokens[-1] not in engine_of(sampled).sampler.eos_ids else "stop")
        assert len(tokens) == size if why == "length" else len(tokens) <= size
        np.testing.assert_allclose(logps, own_logp(prompt, tokens), rtol=0, atol=1e-5)
    assert len({tuple(tokens) for tokens, *_ in answers}) == 14


def test_each_request_has_a_temperature_of_its_own(sampled, greedy):
    """More requests run at the same time than there are slots. The log-probs of each belong to its own distribution."""
    prompt, temperatures = [5, 6, 7], [0.5, 2.0, 0.0, 1.0, None, 0.5]
    ask_at = lambda t: generate(sampled, prompt, **({} if t is None else {"temperature": t}))
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask_at, temperatures))
    for temperature, (ids, logps, _) in zip(temperatures, answers, strict=True):
        if temperature == 0.0:
            assert ids == generate(greedy, prompt)[0] and not any(logps)
            continue
        # Measured: 4e-6 nats at most.
        np.testing.assert_allclose(logps, own_logp(prompt, ids, temperature=temperature or 1.0), atol=2e-5)
    assert answers[0][0] != answers[5][0]  # a noise of its own
    cold, hot = (np.mean(answers[i][1]) for i in (0, 1))
    assert hot < cold


def test_a_seed_makes_an_answer_again_whoever_else_asks(sampled):
    prompts = [[5, 6, 7], [8], [5, 6, 7], [5, 6, 7], [5, 6, 7]]
    seeds = [7, 7, 2**40, -1, None]
    ask_with = lambda prompt, seed: generate(sampled, prompt, seed=seed)[0]
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(ask_with, prompts, seeds))
    assert [ask_with(*x) for x in zip(prompts[:4], seeds, strict=False)] == answers[:4]
    assert len({tuple(answers[i]) for i in (0, 2, 3, 4)}) == 4


def test_a_request_without_a_seed_shares_its_noise_with_none_that_has_one(sampled):
    """Once, its noise was that of the request whose seed was the number of earlier requests."""
    count = engine_of(sampled)._count
    assert generate(sampled, [5, 6, 7])[0] != generate(sampled, [5, 6, 7], seed=count)[0]


def test_what_clients_say_that_asks_for_nothing_is_passed_over(greedy):
    """Once, each of these was answered with 400."""
    plain = ask(greedy, CHAT, {"messages": USER})[1]["choices"]
    nothing = {"response_format": {"type": "text"}, "logit_bias": {}, "metadata": {"a": "b"}, "seed": 3}
    nothing |= dict.fromkeys(("reasoning_effort", "functions", "audio", "metadata"))
    parts = [{"role": "user", "content": [{"type": "text", "text": USER[0]["content"]}]}]
    for body in ({"messages": USER} | nothing, {"messages": parts}):
        status, answer = ask(greedy, CHAT, body)
        assert (status, answer.get("choices")) == (200, plain), answer


def test_greedy_answers_do_not_depend_on_who_else_asks_and_are_streamed_as_they_are(greedy):
    bodies = [
        {"messages": [{"role": "user", "content": x}], "max_tokens": 20} for x in ("a", "Hello", "?", "abc", "zz")
    ]
    alone = [ask(greedy, "/v1/chat/completions", body) for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda body: ask(greedy, "/v1/chat/completions", body), bodies))
        streamed = list(pool.map(lambda body: stream(greedy, body), bodies))
    for (status, one), (_, other), events in zip(alone, together, streamed, strict=True):
        assert status == 200 and one["choices"] == other["choices"]
        text = one["choices"][0]["message"]["content"]
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]) == text
        assert events[-2]["choices"][0]["finish_reason"] == one["choices"][0]["finish_reason"]
        assert events[-1]["usage"] == one["usage"]
        assert one["usage"]["completion_tokens"] <= 20


def stream(server, body, wait_s=0.0):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    body = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
    connection.request("POST", "/v1/chat/completions", body)
    response, parts = connection.getresponse(), []
    while part := response.read1(64) if wait_s else response.read():
        parts.append(part)
        time.sleep(wait_s)
    lines = b"".join(parts).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_stream_has_the_log_probs_of_the_whole_and_null_is_no_size(greedy):
    body = {"messages": USER, "max_tokens": 12, "logprobs": True, "max_completion_tokens": None}
    status, whole = ask(greedy, CHAT, body)
    assert status == 200
    events = [event["choices"][0]["logprobs"] for event in stream(greedy, body) if event["choices"]]
    content = [one for logprobs in events if logprobs for one in logprobs["content"]]
    assert content == whole["choices"][0]["logprobs"]["content"] and len(content) == 12
    silent = stream(greedy, body | {"logprobs": False})
    assert all(event["choices"][0]["logprobs"] is None for event in silent if event["choices"])


def test_log_probs_have_the_bytes_of_each_token_though_it_is_half_a_character(sampled):
    tokens = []
    for seed in range(8):
        _, answer = ask(sampled, CHAT, {"messages": USER, "logprobs": True, "seed": seed})
        (choice,) = answer["choices"]
        content = [one for one in choice["logprobs"]["content"] if one["token"]]  # special tokens are not shown
        spelled = bytes(byte for one in content for byte in one["bytes"])
        assert spelled.decode(errors="replace") == choice["message"]["content"]
        tokens += content
    assert any(one["token"] == "\ufffd" and one["bytes"][0] >= 0x80 for one in tokens)


def test_a_conversation_that_cannot_fit_is_refused_before_it_is_encoded(greedy, monkeypatch):
    """Once, 16 MB of text took half a minute of a core."""
    monkeypatch.setattr(greedy.tokenizer, "encode_prompt", None)
    for content in ("a " * 2**22, [{"type": "text", "text": "b" * 2**20}] * 4):
        status, answer = ask(greedy, CHAT, {"messages": [{"role": "user", "content": content}]})
        assert status == 400 and "characters" in answer["error"]["message"]
    status, _ = ask(greedy, GENERATE, {"token_ids": [1] * 10**6})
    assert status == 400


def test_a_stop_string_ends_it_and_is_not_shown(greedy):
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    text = ask(greedy, "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    stop = text[5:7]
    status, answer = ask(greedy, "/v1/chat/completions", body | {"stop": [stop, "not there"]})
    (choice,) = answer["choices"]
    assert (status, choice["finish_reason"]) == (200, "stop")
    assert choice["message"]["content"] == text[: text.index(stop)]
    shown = [event["choices"][0]["delta"].get("content", "") for event in stream(greedy, body | {"stop": stop})[:-1]]
    assert "".join(shown) == text[: text.index(stop)]


def test_a_special_token_among_stop_strings_is_heard_as_a_token_or_refused(greedy, monkeypatch):
    """No text contains its letters. Clients send the end token of their model."""
    tokens, logps, _ = generate(greedy, [1, 2, 3])
    place = next(i for i in range(3, len(tokens)) if tokens[i] not in tokens[:i])
    until_there = generate(greedy, [1, 2, 3], stop_token_ids=[tokens[place]])
    assert generate(greedy, [1, 2, 3], stop=["<|pad|>", "\0\0"]) == (tokens, logps, "length")
    encode = greedy.tokenizer.encode

    def encoded(text, special_tokens=False):
        return [tokens[place]] if special_tokens and text == "<|pad|>" else encode(text, special_tokens=special_tokens)

    monkeypatch.setattr(greedy.tokenizer, "encode", encoded)
    assert generate(greedy, [1, 2, 3], stop="<|pad|>") == until_there
    for stop, word in (("a<|pad|>", "stop_token_ids"), ("\ud800", "surrogate")):
        status, answer = ask(greedy, GENERATE, {"token_ids": [1], "sampling_params": {"stop": stop}})
        assert status == 400
        check_refusal(answer["error"]["message"], "stop", stop, word)


def test_tokens_that_the_request_names_end_it_too(greedy):
    tokens, logps, _ = generate(greedy, [1, 2, 3])
    place = next(i for i in range(3, len(tokens)) if tokens[i] not in tokens[:i])
    assert generate(greedy, [1, 2, 3], stop_token_ids=[tokens[place]]) == (
        tokens[: place + 1],
        logps[: place + 1],
        "stop",
    )


@pytest.mark.tier("slow")  # plain: test_lora.py
def test_adapters_of_unlike_ranks_and_targets_answer_as_each_alone_over_one_base(tmp_path):
    kinds = {
        "plain": LoraConfig(rank=2, alpha=8.0, targets=("q", "down")),
        "dora": LoraConfig(rank=3, alpha=4.0, rank_stabilised=True, dora=True, targets=("v", "down")),
    }
    rng, adapters = np.random.default_rng(0), {}
    for name, config in kinds.items():
        model = Model(pretrained.resolve(MODEL).architecture(), lora=config)
        shapes, _ = lora.split(model.abstract_params(mesh_of(ONE)))
        learned = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)
        adapters[name] = str(tmp_path / name)
        peft.export(learned, model, pretrained.resolve(MODEL).tokenizer(), adapters[name], MODEL)
    prompts = [rng.integers(0, 250, rng.integers(1, WIDTH + 1)).tolist() for _ in range(12)]
    asked = [(prompt, (MODEL, *kinds)[i % 3]) for i, prompt in enumerate(prompts)]
    with serving(slots=2, adapters=adapters) as server:
        listed = ask(server, "/v1/models", "", method="GET")[1]["data"]
        assert [model["id"] for model in listed] == [MODEL, "plain", "dora"]
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda x: generate(server, *x, max_tokens=12), asked))
        status, answer = ask(server, GENERATE, {"token_ids": [1], "model": "other"})
        assert status == 404
        check_refusal(answer["error"]["message"], "model", "other", "'random:debug'", "'plain'", "'dora'")
        leaves = [jax.tree_util.tree_leaves_with_path(x._params) for x in server.engines.values()]
    for (prompt, name), (tokens, logps, _) in zip(asked, answers, strict=True):
        np.testing.assert_allclose(logps, own_logp(prompt, tokens, adapters.get(name, "")), rtol=0, atol=1e-5)
        assert (np.abs(logps - own_logp(prompt, tokens)).max() > 0.01) == (name != MODEL)
    for (path, x), *others in zip(*leaves, strict=True):
        assert "_lora_" in jax.tree_util.keystr(path) or all(y is x for _, y in others)


def test_room_is_asked_for_the_base_and_for_each_adapter(tmp_path, monkeypatch):
    model = Model(pretrained.resolve(MODEL).architecture(), lora=LoraConfig(rank=2, targets=("q",)))
    shapes, _ = lora.split(model.abstract_params(mesh_of(ONE)))
    learned = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    peft.export(learned, model, pretrained.resolve(MODEL).tokenizer(), str(tmp_path), MODEL)
    counts = []

    def stop(states, *_):
        counts.append(len(states))
        raise ConfigError("no room")

    monkeypatch.setattr("jaxrl_llm.commands.serve.check_fits", stop)
    for names in ((), ("a",), ("a", "b")):
        with raises_with(ConfigError, "no room"), serving(adapters=dict.fromkeys(names, str(tmp_path))):
            pass
    assert counts == [1, 2, 3]


def test_adapters_have_names_of_their_own():
    assert adapters_of(["a=x/y", "z"], MODEL) == {"a": "x/y", "z": "z"}
    for given in (["a=x", "a=y"], ["=x"], [f"{MODEL}=x"]):
        with refused("--adapter", given[-1], "NAME=FOLDER"):
            adapters_of(given, MODEL)


def test_models_are_listed_with_their_length(sampled):
    status, answer = ask(sampled, "/v1/models", "", method="GET")
    assert status == 200 and answer["data"][0]["id"] == MODEL and answer["data"][0]["max_model_len"] == WIDTH + MOST


GENERATE, CHAT = "/inference/v1/generate", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/nothing", {}, 404, ["POST /v1/nothing"]),
        (GENERATE, "{", 400, ["the body"]),
        (GENERATE, "[]", 400, ["JSON object"]),
        (GENERATE, {}, 400, ["token_ids=None"]),
        (GENERATE, {"token_ids": [1, -1]}, 400, ["token_ids=[1, -1]"]),
        (GENERATE, {"token_ids": [True]}, 400, ["token_ids=[True]"]),
        (GENERATE, {"token_ids": [1] * 49}, 400, ["49 tokens", "48"]),
        (GENERATE, {"token_ids": [1], "model": "other"}, 404, ["model='other'", "'random:debug'"]),
        (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 25}}, 400, ["max_tokens=25"]),
        (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 0}}, 400, ["max_tokens=0", "24"]),
        (GENERATE, {"token_ids": [1], "sampling_params": {"temperature": 0.005}}, 400, ["temperature=0.005", "0.01"]),
        (GENERATE, {"token_ids": [1], "sampling_params": {"temperature": "hot"}}, 400, ["temperature='hot'"]),
        (GENERATE, {"token_ids": [1], "sampling_params": {"top_p": 0.5}}, 400, ["top_p=0.5", "1"]),
        (GENERATE, {"token_ids": [1], "sampling_params": {"n": 2}}, 400, ["n=2", "1"]),
        (GENERATE, {"token_ids": [1], "sampling_params": {"seed": "a"}}, 400, ["seed='a'"]),
        (GENERATE, {"token_ids": [1], "sampling_params": []}, 400, ["sampling_params=[]"]),
        (GENERATE, {"token_ids": [1], "sampling_params": {"stop_token_ids": ["x"]}}, 400, ["stop_token_ids=['x']"]),
        (CHAT, {"messages": []}, 400, ["messages=[]"]),
        (CHAT, {"messages": [{"role": "user"}]}, 400, ["messages=[{'role': 'user'}]"]),
        (CHAT, {"messages": USER, "functions": []}, 400, ["functions=[]"]),
        (CHAT, {"messages": USER, "reasoning_effort": "low"}, 400, ["reasoning_effort='low'"]),
        (
            CHAT,
            {"messages": USER, "response_format": {"type": "json_object"}},
            400,
            ["response_format={'type': 'json_object'}"],
        ),
        (CHAT, {"messages": USER, "logit_bias": {"3": 1}}, 400, ["logit_bias={'3': 1}", "{}"]),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            ["content={'type': 'image_url'}"],
        ),
        (CHAT, {"messages": USER, "stop": [1]}, 400, ["stop=[1]"]),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"thinking": 1}}, 400, ["chat_template_kwargs.thinking=1"]),
        (CHAT, {"messages": USER, "chat_template_kwargs": "x"}, 400, ["chat_template_kwargs='x'"]),
        (CHAT, {"messages": USER, "stream": True, "stream_options": 1}, 400, ["stream_options=1"]),
        (CHAT, {"messages": USER, "stream": "false"}, 400, ["stream='false'"]),
        (CHAT, {"messages": USER, "stream": 0}, 400, ["stream=0"]),
        (CHAT, {"messages": USER, "logprobs": "no"}, 400, ["logprobs='no'"]),
        (CHAT, {"messages": USER, "stream_options": {"include_usage": 1}}, 400, ["stream_options.include_usage=1"]),
        (CHAT, {"messages": USER, "tools": {}}, 400, ["tools={}"]),
        (CHAT, {"messages": USER, "stop": ""}, 400, ["stop=['']"]),
        (CHAT, {"messages": USER, "stop": 0}, 400, ["stop=0"]),
        (GENERATE, {"token_ids": [1], "sampling_params": {"stop_token_ids": 0}}, 400, ["stop_token_ids=0"]),
    ],
)
def test_what_is_not_there_is_refused_by_name(sampled, path, body, status, words):
    found, answer = ask(sampled, path, body)
    assert found == status, answer
    check_words(answer["error"]["message"], *words)


@pytest.mark.parametrize(
    ("size", "status"), [(10**12, 413), ("9" * 4000, 413), ("\u00b2", 400), ("-1", 400), ("", 400)]
)
def test_a_body_without_end_is_not_read(sampled, size, status):
    with socket.create_connection(("127.0.0.1", sampled.server_port), timeout=30) as plug:
        plug.sendall(f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode("latin-1"))
        assert plug.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_with_a_token_none_else_is_answered_and_too_many_are_told_so_and_who_has_gone_gives_the_slot_back():
    with serving(slots=1, max_waiting=2, token="secret", seed=None) as server:
        body = {"token_ids": [1, 2, 3]}
        assert 0 < engine_of(server)._count < 2**30  # requests without a seed have the noise of no other server
        for token in ("", "other"):
            assert ask(server, GENERATE, body, token=token)[0] == 401
        assert ask(server, "/v1/models", "", method="GET", token="secret")[0] == 200
        # Nobody is served while the engine is held.
        step = engine_of(server)._step
        held = threading.Event()
        engine_of(server)._step = lambda: (held.wait(60), step())
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: a.example\r\nAuthorization: bearer secret\r\n"
        data = json.dumps(body)
        plugs = []
        for _ in range(3):  # one in the slot, two that wait
            plugs.append(socket.create_connection(("127.0.0.1", server.server_port), timeout=30))
            plugs[-1].sendall(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
            until(lambda n=len(plugs): len(engine_of(server)._waiting) + len(engine_of(server)._rows) == n)
        status, answer = ask(server, GENERATE, body, token="secret")
        assert status == 429 and answer["error"]["message"]
        for plug in plugs:
            plug.close()
        held.set()
        until(lambda: not engine_of(server)._rows and not engine_of(server)._waiting)
        status, answer = ask(server, GENERATE, body, token="secret")
        assert status == 200 and answer["choices"][0]["token_ids"]


def until(holds, seconds=30):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_does_not_fit_is_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.commands.serve.compile_all", None)
    for settings, named in (
        ({"slots": 0}, ("--slots", 0)),
        ({"slots": 2**31 - 1}, ("--slots", 2**31 - 1, "--max_tokens=24", "--max_prompt_tokens=48")),
        ({"max_prompt_tokens": 10**9}, ("--max_prompt_tokens", 10**9, "--max_tokens=24")),
    ):
        given = {"slots": 4, "max_prompt_tokens": WIDTH, "max_waiting": 1} | settings
        with refused(*named):
            server_of(MODEL, sampling=SamplingConfig(max_completion_tokens=MOST), **given)


def test_weights_that_are_missing_are_told_before_anything_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr("jaxrl_llm.commands.serve.compile_all", None)
    folder, model = tmp_path / "model", Model(PRESETS["debug"])
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), model.abstract_params(mesh_of(ONE)))
    hf.export(zeros, model, make_byte_tokenizer(), folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    given = {"slots": 4, "max_prompt_tokens": WIDTH, "max_waiting": 1}
    with raises_with(ConfigError, "model.norm.weight"):
        server_of(str(folder), sampling=SamplingConfig(max_completion_tokens=MOST), **given)


def test_a_port_that_another_has_is_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.commands.serve.compile_all", None)
    given = {"slots": 4, "max_prompt_tokens": WIDTH, "max_waiting": 1}
    given["sampling"] = SamplingConfig(max_completion_tokens=MOST)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with refused("--port", port, "--host='127.0.0.1'", "Address already in use"):
            server_of(MODEL, address=("127.0.0.1", port), **given)


@pytest.mark.slow
def test_256_streams_at_once_for_a_minute_lose_and_mix_nothing(greedy):
    """The same ten questions again and again; some readers are slow, and some disconnect."""
    bodies = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(10)]
    expected = [ask(greedy, CHAT, body)[1]["choices"][0]["message"]["content"] for body in bodies]
    end, counts = time.monotonic() + 60, []

    def client(number):
        count, rng = 0, np.random.default_rng(number)
        while time.monotonic() < end:
            i = int(rng.integers(10))
            if rng.random() < 0.05:
                with socket.create_connection(("127.0.0.1", greedy.server_port), timeout=60) as plug:
                    data = json.dumps(bodies[i] | {"stream": True})
                    plug.sendall(f"POST {CHAT} HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n{data}".encode())
                    plug.recv(10)
                continue
            events = stream(greedy, bodies[i], wait_s=0.1 if rng.random() < 0.05 else 0.0)
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])
            assert text == expected[i]
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(256) as pool:
        counts = list(pool.map(client, range(256)))
    assert min(counts) >= 1
    until(lambda: not engine_of(greedy)._rows and not engine_of(greedy)._waiting)


@pytest.mark.tier("parity")
def test_the_openai_client_is_served(greedy):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{greedy.server_port}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    messages = [{"role": "user", "content": "Hello"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, logprobs=True)
    (choice,) = whole.choices
    assert choice.finish_reason == "length" and len(choice.logprobs.content) == 12 == whole.usage.completion_tokens
    parts = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=messages, temperature=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_serves_until_it_is_told_to_stop(number):
    command = [sys.executable, "-m", "jaxrl_llm.serve", "--model=random:debug", "--port=0", "--slots=8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        port = int(re.fullmatch(r"serving     random:debug at http://127.0.0.1:(\d+)/v1\n", line)[1])
        status, answer = ask(types.SimpleNamespace(server_port=port), CHAT, {"messages": USER, "max_tokens": 3})
        assert status == 200 and answer["usage"]["completion_tokens"] <= 3
        process.send_signal(number)
        assert process.wait(60) == 0 and process.stderr.read() == ""


@pytest.mark.tier("parity")
def test_verifiers_own_train_client_is_served(sampled, tmp_path):
    """Its renderer makes the tokens, the server draws, and the client receives the drawn tokens."""
    pytest.importorskip("verifiers.v1")
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects.chat import ChatDialect
    from verifiers.v1.types import SamplingConfig as Asked

    tokenizer = pretrained.resolve(MODEL).tokenizer()
    tokenizer.save(tmp_path)
    settings = {"base_url": f"http://127.0.0.1:{sampled.server_port}/v1", "renderer_model_name": str(tmp_path)}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What is 2 + 2?"}]}

    async def ask_once():
        client = TrainClient(TrainClientConfig(**settings))
        try:
            return await client.get_response(ChatDialect(), body, Asked(max_tokens=8, temperature=1.0))
        finally:
            await client.client.close()

    response = asyncio.run(ask_once())
    drawn = response.tokens
    prompt = tokenizer.encode_prompt(body["messages"], chat_template=True, system_prompt="")
    assert drawn.prompt_ids == prompt and 1 <= len(drawn.completion_ids) <= 8
    np.testing.assert_allclose(drawn.completion_logprobs, own_logp(prompt, drawn.completion_ids), rtol=0, atol=1e-5)
