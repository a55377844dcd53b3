"""Serve: completions of a model over HTTP, for agents and for anything that speaks the OpenAI API.

    python -m jaxrl_llm.serve --model=smollm2-135m-instruct --port=8000

Token ids in, token ids with the log-probs that they were drawn with out: /inference/v1/generate. Messages and text:
/v1/chat/completions. Requests are decoded side by side in as many slots as --slots; more wait, up to --max_waiting.

Owns: the command's work. Does not know: routes, the table of requests.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from absl import flags

from jaxrl_llm.actor.sampler import Sampler
from jaxrl_llm.config import Config, ConfigError, MeshConfig, SamplingConfig
from jaxrl_llm.learner import publish
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import cli, rng, sharding
from jaxrl_llm.runtime.programs import compile_all, use_cache
from jaxrl_llm.serving.engine import Engine
from jaxrl_llm.serving.http import Server


def server_of(
    path: str,
    *,
    address: tuple[str, int] = ("127.0.0.1", 0),
    sampling: SamplingConfig,
    max_prompt_tokens: int,
    slots: int,
    max_waiting: int,
    token: str = "",
    seed: int = 0,
    compute_dtype: str = "float32",
) -> Server:
    """A server of the model at ``path``, with its engine running; ``serve_forever`` answers.

    Raises:
        ConfigError: bad input, before anything is compiled.
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
    at_once = min(8, slots // shards) * shards  # prompts of one prefill
    sampler = Sampler(
        model=Model(arch, compute_dtype),
        mesh=mesh,
        sampling=sampling,
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
    shapes = publish.abstract_params(sampler.model, mesh)
    programs = sampler.programs(shapes) | publish.programs(sampler.model, mesh, mesh)
    compiled = compile_all(programs, mesh)
    params = compiled["publish"](source.load_params(sampler.model, mesh, seed=seed))
    key = sharding.put(rng.stream(seed, "sample"), sharding.replicated(mesh, 0))
    engine = Engine(sampler, compiled, params, key, tokenizer.decode, max_waiting)
    return Server(address, engine, path, tokenizer, sampling.temperature, token)


def main() -> None:
    use_cache(Config().compilation_cache)
    for flag in (MAX_TOKENS, MAX_PROMPT_TOKENS, MAX_WAITING):
        if flag.value < 1:
            raise ConfigError(f"--{flag.name}={flag.value} must be at least 1")
    if not 0.0 <= TEMPERATURE.value <= 100.0:
        raise ConfigError(f"--temperature={TEMPERATURE.value} must be at least 0 and at most 100")
    token = os.environ.get("JAXRL_SERVE_TOKEN", "")
    if HOST.value not in ("127.0.0.1", "::1", "localhost") and not token:
        raise ConfigError(f"--host={HOST.value!r:.100} lets others in: set JAXRL_SERVE_TOKEN, which they must bear")
    server = server_of(
        MODEL.value,
        address=(HOST.value, PORT.value),
        sampling=SamplingConfig(temperature=TEMPERATURE.value, max_completion_tokens=MAX_TOKENS.value),
        max_prompt_tokens=MAX_PROMPT_TOKENS.value,
        slots=SLOTS.value,
        max_waiting=MAX_WAITING.value,
        token=token,
        seed=SEED.value,
        compute_dtype=COMPUTE_DTYPE.value,
    )
    print(f"serving     {MODEL.value} at http://{HOST.value}:{server.server_port}/v1", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # in another thread: it waits for the loop that this one interrupts
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    with server:
        threading.Thread(target=_watch, args=(server,), daemon=True).start()
        server.serve_forever()
    server.engine.close()
    if server.engine.error:
        raise server.engine.error


def _watch(server: Any) -> None:
    """End the server with its engine."""
    server.engine.join()
    server.shutdown()


if __name__ == "__main__":
    MODEL = flags.DEFINE_string("model", None, "Hugging Face folder, GGUF file, smollm2-135m-instruct or hub id.")
    HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; others reach it only with a token.")
    PORT = flags.DEFINE_integer("port", 8000, "Port; 0 takes a free one.", lower_bound=0, upper_bound=65535)
    SLOTS = flags.DEFINE_integer("slots", 32, "Completions decoded side by side.")
    MAX_WAITING = flags.DEFINE_integer("max_waiting", 256, "Requests that may wait; more are answered with 429.")
    MAX_PROMPT_TOKENS = flags.DEFINE_integer("max_prompt_tokens", 512, "Longest prompt.")
    MAX_TOKENS = flags.DEFINE_integer("max_tokens", 512, "Longest completion.")
    TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Softmax temperature; 0 is greedy.")
    SEED = flags.DEFINE_integer("seed", 0, "Of the noise.")
    COMPUTE_DTYPE = flags.DEFINE_enum("compute_dtype", "float32", ["float32", "bfloat16"], "Arithmetic.")
    flags.mark_flag_as_required("model")
    cli.run(main)
