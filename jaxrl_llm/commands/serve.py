"""Serve: completions of a model over HTTP, for agents and for anything that speaks the OpenAI API.

    python -m jaxrl_llm.serve --model=smollm2-135m-instruct --port=8000

Token ids in, token ids with the log-probs that they were drawn with out: /inference/v1/generate. Messages and text:
/v1/chat/completions. Requests are decoded side by side in as many slots as --slots; more wait, up to --max_waiting.

    python -m jaxrl_llm.serve --model=BASE --adapter=terse=FOLDER --adapter=kind=FOLDER

Adapters are models too, by their names, over one copy of the base. Each has slots of its own; they decode by turns.

Owns: the command's work. Does not know: routes, the table of requests.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import Config, ConfigError, LoraConfig, MeshConfig, SamplingConfig
from jaxrl_llm.learner import publish
from jaxrl_llm.models import lora
from jaxrl_llm.models.files import peft, pretrained
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.run import check_fits
from jaxrl_llm.runtime import cli, rng, sharding
from jaxrl_llm.runtime.programs import compile_all, use_cache
from jaxrl_llm.serving.engine import Engine
from jaxrl_llm.serving.http import Server
from jaxrl_llm.serving.tempering import TemperingSampler

FLAGS = flags.FLAGS


def server_of(
    path: str,
    adapters: Mapping[str, str] | None = None,
    *,
    address: tuple[str, int] = ("127.0.0.1", 0),
    sampling: SamplingConfig,
    max_prompt_tokens: int,
    slots: int,
    max_waiting: int,
    token: str = "",
    seed: int | None = 0,
    compute_dtype: str = "float32",
) -> Server:
    """A server of the model at ``path``, with its engines running; ``serve_forever`` answers.

    Args:
        adapters: folders of such over it, by name.
        seed: of the noise; with None requests without a seed of their own have the noise of no other server.

    Raises:
        ConfigError: bad input, or an address that cannot be had, before anything is compiled.
    """
    source = pretrained.resolve(path)
    arch, tokenizer = source.architecture(), source.tokenizer().ending_at(sampling.stop_tokens)
    mesh = sharding.make_mesh(MeshConfig())
    shards = sharding.num_data_shards(mesh)
    if slots < 1 or slots % shards:
        raise ConfigError(f"--slots={slots} must be a multiple of {shards}, the devices with rows of their own")
    if max_prompt_tokens + sampling.max_completion_tokens > arch.max_positions:
        both = f"--max_prompt_tokens={max_prompt_tokens} + --max_tokens={sampling.max_completion_tokens}"
        raise ConfigError(f"{both} must be at most the model's {arch.max_positions} positions")
    try:
        num_requests = (slots + max_waiting) * (1 + len(adapters or {}))
        server = Server(address, {}, tokenizer, sampling.temperature, token, num_requests=num_requests)
    except OSError as error:
        raise ConfigError(f"--host={address[0]!r:.100} --port={address[1]}: {error}") from error
    try:
        how = {"slots": slots, "max_waiting": max_waiting, "seed": seed, "compute_dtype": compute_dtype}
        server.engines = _engines(path, source, adapters or {}, mesh, tokenizer, sampling, max_prompt_tokens, **how)
    except BaseException:
        server.server_close()
        raise
    server.activate()  # not before: a client that comes before there are weights is refused, and does not hang
    return server


def _engines(
    path: str,
    source: Any,
    adapters: Mapping[str, str],
    mesh: Any,
    tokenizer: Any,
    sampling: SamplingConfig,
    max_prompt_tokens: int,
    *,
    slots: int,
    max_waiting: int,
    seed: int | None,
    compute_dtype: str,
) -> dict[str, Engine]:
    """Running ones of the model and its adapters, by name; arguments as of ``server_of``."""
    arch, shards = source.architecture(), sharding.num_data_shards(mesh)
    at_once = min(8, slots // shards) * shards  # prompts of one prefill
    configs = {name: peft.read_config(folder) for name, folder in adapters.items()}
    model, apart = Model(arch, compute_dtype), {path: ({"blocks": {}}, LoraConfig())}
    for name, config in configs.items():
        apart[name] = peft.load(adapters[name], dataclasses.replace(model, lora=config), mesh), config
    if adapters:
        model = dataclasses.replace(model, lora=lora.common(configs.values()))
    is_greedy = sampling.temperature == 0
    base = source.load_params(model.base, mesh, seed=seed or 0)  # which may be wrong, before anything is compiled
    sampler = (Sampler if is_greedy else TemperingSampler)(
        model=model,
        mesh=mesh,
        sampling=sampling if is_greedy else dataclasses.replace(sampling, temperature=1.0),
        eos_ids=tokenizer.eos_ids,
        num_prompts=at_once,
        group_size=1,
        max_prompt_tokens=max_prompt_tokens,
        num_slots=slots,
        chunk_steps=8,
        lookahead=slots - at_once,
        keeps_support=False,
        cuts_rows=True,
    )
    sizes = {"--slots": slots, "--max_tokens": sampling.max_completion_tokens, "--max_prompt_tokens": max_prompt_tokens}
    check_fits([sampler.abstract_state()] * (1 + len(adapters)), mesh, sizes)  # each engine has its own
    programs = sampler.programs(publish.abstract_params(model, mesh)) | publish.programs(model, mesh, mesh)
    compiled = compile_all(programs, mesh)
    if adapters:
        shapes = model.abstract_params(mesh)
        own = {name: lora.fit(*each, shapes, model.lora, base) for name, each in apart.items()}
        shared = compiled["publish_base"](base)
        params = {name: lora.join(compiled["publish"](each, base), shared) for name, each in own.items()}
    else:
        params = {path: compiled["publish"](base)}
    turn, key = threading.Lock(), sharding.put(rng.stream(seed or 0, "sample"), sharding.replicated(mesh, 0))
    compiled = {name: _in_turn(program, turn) for name, program in compiled.items()}
    given = key, tokenizer.decode, max_waiting
    first = lambda: secrets.randbelow(2**30) if seed is None else 0
    return {name: Engine(sampler, compiled, each, *given, first()) for name, each in params.items()}


def _in_turn(program: Callable, turn: threading.Lock) -> Callable:
    """A program of several engines' threads: it must come to all devices in one order."""

    def run(*args: Any) -> Any:
        with turn:
            return program(*args)

    return run


def adapters_of(flags_given: list[str], model: str) -> dict[str, str]:
    """Folders by name, of "name=folder" or a folder that is its own name; ConfigError where one stands twice."""
    found = {model: ""}
    for text in flags_given:
        name, _, folder = text.partition("=")
        if name in found or not name:
            raise ConfigError(f"--adapter={text!r:.200} must be NAME=FOLDER with a name of its own")
        found[name] = folder or name
    del found[model]
    return found


def serve(
    model: str,
    adapters: Mapping[str, str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    slots: int = 32,
    max_waiting: int = 256,
    max_prompt_tokens: int = 512,
    max_tokens: int = 512,
    temperature: float = 1.0,
    seed: int | None = None,
    compute_dtype: str = "float32",
) -> None:
    """Answer requests until SIGINT, SIGTERM or SIGHUP. The token of JAXRL_SERVE_TOKEN, if set, protects the server.

    Args:
        model: a model, as ``model.path`` names it.
        adapters: folders of adapters (PEFT) by the name that requests use.
        slots: completions decoded side by side.
        max_waiting: requests that may wait; more are answered with status 429.
        temperature: of requests that name none; 0 is greedy decoding of all requests.
        seed: of the sampling noise; None = new noise at every start.

    Raises:
        ConfigError: bad input, before anything is compiled.
    """
    use_cache(Config().compilation_cache)
    at_least_one = {"max_tokens": max_tokens, "max_prompt_tokens": max_prompt_tokens, "max_waiting": max_waiting}
    for name, value in at_least_one.items():
        if value < 1:
            raise ConfigError(f"--{name}={value} must be at least 1")
    if temperature != 0 and not 0.01 <= temperature <= 100.0:
        raise ConfigError(f"--temperature={temperature} must be 0 or from 0.01 to 100")
    token = os.environ.get("JAXRL_SERVE_TOKEN", "")
    if host not in ("127.0.0.1", "::1", "localhost") and not token:
        raise ConfigError(f"--host={host!r:.100} lets others in: set JAXRL_SERVE_TOKEN, which they must bear")
    server = server_of(
        model,
        adapters,
        address=(host, port),
        sampling=SamplingConfig(temperature=temperature, max_completion_tokens=max_tokens),
        max_prompt_tokens=max_prompt_tokens,
        slots=slots,
        max_waiting=max_waiting,
        token=token,
        seed=seed,
        compute_dtype=compute_dtype,
    )
    shown_host = f"[{host}]" if ":" in host else host
    print(f"serving     {model} at http://{shown_host}:{server.server_port}/v1", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: server.shutdown())
    with server:
        for engine in server.engines.values():
            threading.Thread(target=_watch, args=(server, engine), daemon=True).start()
        server.serve_forever()
    for engine in server.engines.values():
        engine.close()
        if engine.error:
            raise engine.error


def _watch(server: Server, engine: Engine) -> None:
    """End the server with its engine."""
    engine.join()
    server.shutdown()


def main() -> None:
    """Run the command with the values of its flags."""
    serve(
        FLAGS.model,
        adapters_of(FLAGS.adapter, FLAGS.model),
        host=FLAGS.host,
        port=FLAGS.port,
        slots=FLAGS.slots,
        max_waiting=FLAGS.max_waiting,
        max_prompt_tokens=FLAGS.max_prompt_tokens,
        max_tokens=FLAGS.max_tokens,
        temperature=FLAGS.temperature,
        seed=FLAGS.seed,
        compute_dtype=FLAGS.compute_dtype,
    )


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_string("model", None, pretrained.SOME)
    flags.DEFINE_multi_string("adapter", [], "NAME=FOLDER of adapters (PEFT) over it; may be given repeatedly.")
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; others reach it only with a token.")
    flags.DEFINE_integer("port", 8000, "Port; 0 takes a free one.", lower_bound=0, upper_bound=65535)
    flags.DEFINE_integer("slots", 32, "Completions decoded side by side.", upper_bound=2**31 - 1)
    flags.DEFINE_integer("max_waiting", 256, "Requests that may wait; more are answered with 429.")
    flags.DEFINE_integer("max_prompt_tokens", 512, "Longest prompt.")
    flags.DEFINE_integer("max_tokens", 512, "Longest completion.")
    flags.DEFINE_float("temperature", 1.0, "Softmax temperature of requests that name none; 0 is greedy, for all.")
    said = "Of the noise; by default requests without a seed of their own have another at every start."
    flags.DEFINE_integer("seed", None, said, lower_bound=0, upper_bound=2**31 - 1)
    flags.DEFINE_enum("compute_dtype", "float32", ["float32", "bfloat16"], "Arithmetic.")
    flags.mark_flag_as_required("model")


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__, alone=True)
