"""Hugging Face folders: read to sharded arrays, written so that transformers loads them.

Owns: the files of a folder. What families call their tensors and settings stands in families. Needs neither torch nor
transformers. Does not know: tokenizers (but for the token ids in the config), how parameters are laid out on devices.
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
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.files import families, layout
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.runtime import hosts

MAX_FILE_BYTES = 5 * 10**9


def read_architecture(folder: str | Path) -> Architecture:
    """Shape of the model in ``folder``, from its config.json.

    Raises:
        ConfigError: no config.json, another kind of model, or a setting that the model code lacks.
    """
    path, adapter = (Path(folder) / name for name in ("config.json", "adapter_config.json"))
    if adapter.is_file() and not path.exists():
        base = _read_json(adapter).get("base_model_name_or_path")
        raise ConfigError(f"{folder}: is an adapter of {base!r:.200} (PEFT), no model; merge it into its base first")
    return families.architecture_of(_read_json(path), path)


def load_params(folder: str | Path, model: Model, mesh: Mesh) -> Params:
    """Float32 parameters of ``folder``, straight onto the shards; stored as float32, bfloat16 or float16.

    Raises:
        ConfigError: no safetensors, an unreadable file, or a missing, misshapen or unknown tensor.
    """
    file = _Folder(Path(folder))
    _check_tied(file, model)
    return layout.load(file, families.names_of(model.arch), model, mesh)


def check_weights(folder: str | Path, model: Model, mesh: Mesh) -> None:
    """Raise the ``ConfigError`` that ``load_params`` would, from the files' headers, and a tied head, alone."""
    file = _Folder(Path(folder))
    layout.check(file, families.names_of(model.arch), model, mesh)
    _check_tied(file, model)


def _check_tied(file: _Folder, model: Model) -> None:
    """A stored head beside ``tie_word_embeddings=true`` is the embedding again, or transformers would not tie it."""
    names = families.names_of(model.arch)
    table, head = names["embedding"], names["head"]
    if not model.arch.tied or head not in file.shapes or table not in file.shapes:
        return
    (rows, width), most = file.shapes[table], 4096
    is_same = file.shapes[head] == file.shapes[table]
    for start in range(0, rows, most) if is_same else ():
        part = (slice(start, min(start + most, rows)), slice(0, width))
        is_same = is_same and np.array_equal(file.read(head, part), file.read(table, part))
    if not is_same:
        raise ConfigError(
            f"{file.path}: tensor {head} differs from {table}; tie_word_embeddings=true must then be false"
        )


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
                # Old files keep this constant; and of further tokens a second small model, which nothing here reads.
                if name.endswith("rotary_emb.inv_freq") or name.startswith("mtp."):
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
        for _, _, fetch in layout.stored_tensors(params, families.names_of(model.arch)):
            fetch()  # what is split over hosts, all of them gather
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    _write_weights(params, families.names_of(model.arch), folder)
    tokenizer.save(folder)
    tokens = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids)}
    _write_json(folder / "generation_config.json", {**tokens, "pad_token_id": tokenizer.pad_id})
    _write_json(folder / "config.json", {**families.config_of(model.arch), **tokens})


def _write_weights(params: Params, names: dict[str, str], folder: Path) -> None:
    files: list[list] = [[]]
    filled = 0
    for name, shape, fetch in layout.stored_tensors(params, names):
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
