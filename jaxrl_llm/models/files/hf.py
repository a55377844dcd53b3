"""Hugging Face folders of the Llama family: read to sharded arrays, written so that transformers loads them.

Owns: the names and meaning of config.json and of the safetensors files. Needs neither torch nor transformers.
Does not know: tokenizers (but for the token ids in the config), how parameters are laid out on devices.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches numpy the bfloat16 that safetensors hands out)
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.architecture import Architecture, RopeScaling, positive
from jaxrl_llm.models.files import layout
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.runtime import hosts

NAMES = {
    "embedding": "model.embed_tokens.weight",
    "blocks.attention_norm": "model.layers.{layer}.input_layernorm.weight",
    "blocks.q": "model.layers.{layer}.self_attn.q_proj.weight",
    "blocks.k": "model.layers.{layer}.self_attn.k_proj.weight",
    "blocks.v": "model.layers.{layer}.self_attn.v_proj.weight",
    "blocks.o": "model.layers.{layer}.self_attn.o_proj.weight",
    "blocks.mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "blocks.gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "blocks.up": "model.layers.{layer}.mlp.up_proj.weight",
    "blocks.down": "model.layers.{layer}.mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}

# What an absent key of config.json means, per model_type: the defaults of transformers' own classes.
_LLAMA = {
    "num_key_value_heads": None,  # as many as num_attention_heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
}
ABSENT = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
}
# What the model code computes; a config that says otherwise is another model.
REQUIRED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None}

MAX_FILE_BYTES = 5 * 10**9


def read_architecture(folder: str | Path) -> Architecture:
    """Shape of the model in ``folder``, from its config.json.

    Raises:
        ConfigError: no config.json, another kind of model, or a setting that the model code lacks.
    """
    path = Path(folder) / "config.json"
    config = _read_json(path)
    model_type = config.get("model_type")
    if model_type not in list(ABSENT):
        raise ConfigError(f"{path}: model_type={model_type!r} is not supported; supported: {', '.join(ABSENT)}")
    config = {**ABSENT[model_type], **config}
    for key, value in REQUIRED.items():
        if config[key] != value:
            raise ConfigError(f"{path}: {key}={config[key]!r} is not supported; supported: {value!r}")
    if type(config["tie_word_embeddings"]) is not bool:
        raise ConfigError(f"{path}: tie_word_embeddings={config['tie_word_embeddings']!r:.60} must be true or false")
    try:
        get = lambda key, **how: positive(path, key, config[key], **how)
        width, num_heads = get("hidden_size"), get("num_attention_heads")
        for key, usual in (("num_key_value_heads", num_heads), ("head_dim", width // num_heads)):
            config[key] = usual if config[key] is None else config[key]
        theta, scaling = _rope(config, path)
        return Architecture(
            vocab_size=get("vocab_size"),
            width=width,
            num_layers=get("num_hidden_layers", most=1000),
            num_heads=num_heads,
            num_kv_heads=get("num_key_value_heads"),
            head_size=get("head_dim"),
            ffn=get("intermediate_size"),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=get("rms_norm_eps", whole=False, most=1.0),
            tied=config["tie_word_embeddings"],
            max_positions=get("max_position_embeddings"),
        )
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]} is missing") from error


def _rope(config: dict[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Base and scaling. transformers 5 folds ``rope_theta`` and ``rope_scaling`` into ``rope_parameters``."""
    given = config["rope_parameters"] or config["rope_scaling"] or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: rope_parameters={given!r:.60} must be an object or null")
    rope = {"rope_theta": config["rope_theta"], **given}
    get = lambda key, **how: positive(path, key, rope[key], whole=False, **how)
    kind = rope.get("rope_type", rope.get("type", "default"))  # "type" until 2024
    if kind == "default":
        return get("rope_theta"), None
    if kind != "llama3":
        raise ConfigError(f"{path}: rope_type={kind!r} is not supported; supported: default, llama3")
    low, high = get("low_freq_factor"), get("high_freq_factor")
    positive(path, "high_freq_factor - low_freq_factor", high - low, whole=False)
    most = positive(path, "original_max_position_embeddings", rope["original_max_position_embeddings"])
    return get("rope_theta"), RopeScaling(get("factor"), low, high, original_max_positions=most)


def load_params(folder: str | Path, model: Model, mesh: Mesh) -> Params:
    """Float32 parameters of ``folder``, straight onto the shards; stored as float32, bfloat16 or float16.

    Raises:
        ConfigError: no safetensors, an unreadable file, or a missing, misshapen or unknown tensor.
    """
    return layout.load(_Folder(Path(folder)), NAMES, model, mesh)


def check_weights(folder: str | Path, model: Model, mesh: Mesh) -> None:
    """Raise the ``ConfigError`` that ``load_params`` would, from the files' headers alone."""
    layout.check(_Folder(Path(folder)), NAMES, model, mesh)


class _Folder:
    """The tensors of ``model.safetensors``, or of the files that ``model.safetensors.index.json`` lists."""

    def __init__(self, folder: Path):
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.exists():
            files = [single]
        elif index.exists():
            try:
                # Their names alone: an index has no say about what is elsewhere.
                files = [folder / Path(name).name for name in sorted(set(_read_json(index)["weight_map"].values()))]
            except (KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{index}: has no weight_map of tensor names to files") from error
        else:
            raise ConfigError(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
        self.path = str(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files = {}  # of each tensor
        for path in files:
            if not os.path.isfile(path):
                raise ConfigError(f"{path}: no such file")
            try:
                file = safetensors.safe_open(path, framework="numpy")
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError(f"{path}: not a readable safetensors file ({error})") from error
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                part = file.get_slice(name)
                if name.endswith("rotary_emb.inv_freq"):  # old files keep this constant
                    continue
                if part.get_dtype() not in ("F32", "BF16", "F16"):
                    raise ConfigError(f"{path}: tensor {name} is {part.get_dtype()}; supported: F32, BF16, F16")
                if name in self.shapes:
                    raise ConfigError(f"{path}: tensor {name} is in another file too")
                self.shapes[name] = tuple(part.get_shape())
                self._files[name] = file

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._files[name].get_slice(name)[index].astype(np.float32)


def export(params: Params, model: Model, tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` loads to the same logits.

    Weights are float32 and split over files of at most 5 GB, of which the host holds one at a time.
    config.json comes last: without it an interrupted folder is not taken for a model.
    """
    if not hosts.is_first():
        for _, _, fetch in layout.stored_tensors(params, NAMES):
            fetch()  # what is split over hosts, all of them gather
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    _write_weights(params, folder)
    tokenizer.save(folder)
    tokens = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids)}
    _write_json(folder / "generation_config.json", {**tokens, "pad_token_id": tokenizer.pad_id})
    _write_json(folder / "config.json", {**config_json(model.arch), **tokens})


def _write_weights(params: Params, folder: Path) -> None:
    files: list[list] = [[]]
    filled = 0
    for name, shape, fetch in layout.stored_tensors(params, NAMES):
        num_bytes = 4 * int(np.prod(shape))
        if filled and filled + num_bytes > MAX_FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append((name, fetch))
        filled += num_bytes
    for old in folder.glob("model*.safetensors*"):  # readers would mix them with these
        old.unlink()
    weight_map, total = {}, 0
    for number, tensors in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        arrays = {name: fetch() for name, fetch in tensors}
        safetensors.numpy.save_file(arrays, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors leaves it to its owner alone
        weight_map.update(dict.fromkeys(arrays, file))
        total += sum(array.nbytes for array in arrays.values())
        del arrays
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def config_json(arch: Architecture) -> dict[str, Any]:
    """config.json in the spelling that every version of transformers reads."""
    scaling = arch.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.width,
        "intermediate_size": arch.ffn,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": arch.max_positions,
        "rms_norm_eps": arch.norm_eps,
        "tie_word_embeddings": arch.tied,
        "rope_theta": arch.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        },
        "attention_bias": False,
        "mlp_bias": False,
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"{value!r:.60} is no object")
        return value
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable JSON ({error})") from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
