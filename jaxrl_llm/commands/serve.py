"""Serve: answer requests for completions of a model over HTTP, for agents and for clients of the OpenAI API.

    python -m jaxrl_llm.serve --model=smollm2-135m-instruct --port=8000

There are two routes:

- /inference/v1/generate receives token ids, and returns token ids and the log-probs that they were drawn with.
- /v1/chat/completions receives messages and returns text.

Requests are decoded side by side in --slots slots. Up to --max_waiting more requests wait.

    python -m jaxrl_llm.serve --model=BASE --adapter=terse=FOLDER --adapter=kind=FOLDER

Each adapter is also a model that requests can name. All share one copy of the base. Each adapter has its own slots. The
adapters decode one after another.

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
from jax.sharding import Mesh

from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import Config, ConfigError, LoraConfig, MeshConfig, SamplingConfig
from jaxrl_llm.learner import publish
from jaxrl_llm.models import lora
from jaxrl_llm.models.files import peft, pretrained
from jaxrl_llm.models.files.source import Source
from jaxrl_llm.models.files.tokenizer import Tokenizer
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
    """Return a server of the model at ``path`` whose engines run. ``serve_forever`` answers the requests.

    Args:
        adapters: folders of adapters of this model, by name.
        seed: seed of the sampling noise. With None, requests without their own seed have new noise at every start.

    Raises:
        ConfigError: bad input, or an address that is not available, before anything is compiled.
    """
    source = pretrained.resolve(path)
    source.architecture()  # raises for a model that is not supported
    tokenizer = source.tokenizer().ending_at(sampling.stop_tokens)
    mesh = sharding.make_mesh(MeshConfig())
    served = _Served(
        path=path,
        source=source,
        adapters=adapters or {},
        tokenizer=tokenizer,
        mesh=mesh,
        sampling=sampling,
        max_prompt_tokens=max_prompt_tokens,
        slots=slots,
        max_waiting=max_waiting,
        seed=seed,
        compute_dtype=compute_dtype,
    )
    served.check()
    num_requests = (slots + max_waiting) * (1 + len(served.adapters))
    try:
        server = Server(
            address,
            {},
            tokenizer,
            sampling.temperature,
            token,
            num_requests=num_requests,
        )
    except OSError as error:
        raise ConfigError(f"--host={address[0]!r:.100} --port={address[1]}: {error}") from error
    try:
        server.engines = _engines(served)
    except BaseException:
        server.server_close()
        raise
    # Open the port only after the weights are loaded, so that an early client is refused and does not hang.
    server.activate()
    return server


@dataclasses.dataclass(frozen=True)
class _Served:
    """A model with adapters to serve.

    Attributes:
        path: the model, and the name of its engine.
        source: the files of the model.
        adapters, sampling, max_prompt_tokens, slots, max_waiting, seed, compute_dtype: as for ``server_of``.
    """

    path: str
    source: Source
    adapters: Mapping[str, str]
    tokenizer: Tokenizer
    mesh: Mesh
    sampling: SamplingConfig
    max_prompt_tokens: int
    slots: int
    max_waiting: int
    seed: int | None
    compute_dtype: str

    @property
    def shards(self) -> int:
        return sharding.num_data_shards(self.mesh)

    def check(self) -> None:
        """Raise a ``ConfigError`` if the sizes do not fit the devices or the model."""
        if self.slots < 1 or self.slots % self.shards:
            raise ConfigError(
                f"--slots={self.slots} must be a multiple of {self.shards}, the devices that the rows are split over"
            )
        max_tokens = self.sampling.max_completion_tokens
        max_positions = self.source.architecture().max_positions
        if self.max_prompt_tokens + max_tokens > max_positions:
            raise ConfigError(
                f"--max_prompt_tokens={self.max_prompt_tokens} + --max_tokens={max_tokens} must be at most the "
                f"model's {max_positions} positions"
            )

    def sampler(self, model: Model) -> Sampler:
        """Return the sampler of one engine."""
        num_prompts = min(8, self.slots // self.shards) * self.shards  # prompts of one prefill
        is_greedy = self.sampling.temperature == 0
        kind = Sampler if is_greedy else TemperingSampler
        sampling = self.sampling if is_greedy else dataclasses.replace(self.sampling, temperature=1.0)
        return kind(
            model=model,
            mesh=self.mesh,
            sampling=sampling,
            eos_ids=self.tokenizer.eos_ids,
            num_prompts=num_prompts,
            group_size=1,
            max_prompt_tokens=self.max_prompt_tokens,
            num_slots=self.slots,
            chunk_steps=8,
            lookahead=self.slots - num_prompts,
            keeps_support=False,
            cuts_rows=True,
        )


def _engines(served: _Served) -> dict[str, Engine]:
    """Return the running engines of the model and its adapters, by name."""
    mesh = served.mesh
    model = Model(served.source.architecture(), served.compute_dtype)
    loaded = _load_adapters(served, model)
    if loaded:
        model = dataclasses.replace(model, lora=lora.common([config for _, config in loaded.values()]))
    # Loaded before anything is compiled, because the files may be wrong.
    base = served.source.load_params(model.base, mesh, seed=served.seed or 0)
    sampler = served.sampler(model)
    sizes = {
        "--slots": served.slots,
        "--max_tokens": served.sampling.max_completion_tokens,
        "--max_prompt_tokens": served.max_prompt_tokens,
    }
    check_fits([sampler.abstract_state()] * (1 + len(loaded)), mesh, sizes)  # one state for each engine
    programs = sampler.programs(publish.abstract_params(model, mesh)) | publish.programs(model, mesh, mesh)
    compiled = compile_all(programs, mesh)
    params = _published(served.path, model, mesh, base, loaded, compiled)
    turn = threading.Lock()
    in_turn = {name: _in_turn(program, turn) for name, program in compiled.items()}
    key = sharding.put(rng.stream(served.seed or 0, "sample"), sharding.replicated(mesh, 0))
    engines = {}
    for name, weights in params.items():
        first = secrets.randbelow(2**30) if served.seed is None else 0
        engines[name] = Engine(
            sampler,
            in_turn,
            weights,
            key,
            served.tokenizer.decode,
            served.max_waiting,
            first,
        )
    return engines


def _load_adapters(served: _Served, model: Model) -> dict[str, tuple[Any, LoraConfig]]:
    """Return the weights and the settings of each adapter by name."""
    configs = {name: peft.read_config(folder) for name, folder in served.adapters.items()}
    loaded = {}
    for name, config in configs.items():
        adapted = dataclasses.replace(model, lora=config)
        loaded[name] = peft.load(served.adapters[name], adapted, served.mesh), config
    return loaded


def _published(
    path: str,
    model: Model,
    mesh: Mesh,
    base: Any,
    adapters: Mapping[str, tuple[Any, LoraConfig]],
    compiled: Mapping[str, Callable],
) -> dict[str, Any]:
    """Return the sampler weights of the model ``path`` and of its adapters, by name.

    Args:
        base: the weights of the model.
        adapters: weights and settings of the adapters by name.
    """
    if not adapters:
        return {path: compiled["publish"](base)}
    shapes = model.abstract_params(mesh)
    shared = compiled["publish_base"](base)
    params = {}
    without_adapters = ({"blocks": {}}, LoraConfig())
    for name, (weights, config) in {path: without_adapters, **adapters}.items():
        fitted = lora.fit(weights, config, shapes, model.lora, base)
        params[name] = lora.join(compiled["publish"](fitted, base), shared)
    return params


def _in_turn(program: Callable, turn: threading.Lock) -> Callable:
    """Return the program for use by the threads of several engines. All devices must run the calls in one order."""

    def run(*args: Any) -> Any:
        with turn:
            return program(*args)

    return run


def adapters_of(texts: list[str], model: str) -> dict[str, str]:
    """Return the folders of adapters by name.

    Args:
        texts: "name=folder", or a folder, which is its own name.
        model: name of the model, which an adapter must not have.

    Raises:
        ConfigError: two adapters have one name, or a name is empty.
    """
    folders: dict[str, str] = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if not name or name == model or name in folders:
            raise ConfigError(
                f"--adapter={text!r:.200} must be NAME=FOLDER, and no other model may have this name. Change NAME"
            )
        folders[name] = folder or name
    return folders


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
        max_waiting: number of requests that may wait; further requests get status 429.
        temperature: temperature of requests that do not set one; 0 is greedy decoding of all requests.
        seed: seed of the sampling noise; None = new noise at every start.

    Raises:
        ConfigError: bad input, before anything is compiled.
    """
    use_cache(Config().compilation_cache)
    for name, value in (
        ("max_tokens", max_tokens),
        ("max_prompt_tokens", max_prompt_tokens),
        ("max_waiting", max_waiting),
    ):
        if value < 1:
            raise ConfigError(f"--{name}={value} must be at least 1")
    if temperature != 0 and not 0.01 <= temperature <= 100.0:
        raise ConfigError(f"--temperature={temperature} must be 0 or from 0.01 to 100")
    token = os.environ.get("JAXRL_SERVE_TOKEN", "")
    if host not in ("127.0.0.1", "::1", "localhost") and not token:
        raise ConfigError(
            f"--host={host!r:.100} lets other machines connect: set JAXRL_SERVE_TOKEN, the token of their requests"
        )
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
    _answer_requests(server)


def _answer_requests(server: Server) -> None:
    """Answer requests until a signal or the end of an engine ends the server. Raise the error of an engine."""

    def shut_down(*_: Any) -> None:
        server.shutdown()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, shut_down)
    with server:
        for engine in server.engines.values():
            threading.Thread(target=_watch, args=(server, engine), daemon=True).start()
        server.serve_forever()
    for engine in server.engines.values():
        engine.close()
        if engine.error:
            raise engine.error


def _watch(server: Server, engine: Engine) -> None:
    """End the server when its engine ends."""
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
    flags.DEFINE_multi_string(
        "adapter",
        [],
        "NAME=FOLDER of adapters (PEFT) for the model. The flag may be repeated.",
    )
    flags.DEFINE_string(
        "host",
        "127.0.0.1",
        "Address to listen at. Other machines need a token (JAXRL_SERVE_TOKEN).",
    )
    flags.DEFINE_integer("port", 8000, "Port; 0 takes a free one.", lower_bound=0, upper_bound=65535)
    flags.DEFINE_integer("slots", 32, "Completions decoded side by side.", upper_bound=2**31 - 1)
    flags.DEFINE_integer(
        "max_waiting",
        256,
        "Most requests that wait; more are answered with status 429.",
    )
    flags.DEFINE_integer("max_prompt_tokens", 512, "Most tokens of a prompt.")
    flags.DEFINE_integer("max_tokens", 512, "Most tokens of a completion.")
    flags.DEFINE_float(
        "temperature",
        1.0,
        "Softmax temperature of requests that name none; 0 = greedy decoding of all requests.",
    )
    seed_help = "Seed of the sampling noise. By default, requests without a seed have new noise at every start."
    flags.DEFINE_integer("seed", None, seed_help, lower_bound=0, upper_bound=2**31 - 1)
    flags.DEFINE_enum("compute_dtype", "float32", ["float32", "bfloat16"], "Arithmetic.")
    flags.mark_flag_as_required("model")


def start() -> None:
    """Read the command line and run the command. This function does not return."""
    define_flags()
    cli.run(main, text=__doc__, alone=True)
