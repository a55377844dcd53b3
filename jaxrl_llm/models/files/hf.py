"""Reading of Hugging Face folders into sharded arrays, and writing of folders that transformers can load.

Owns: the files of a folder. The module families has the names of tensors and settings. Needs neither torch nor
transformers. Does not know: tokenizers (except the token ids in the config), how parameters are laid out on devices.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.files import families, layout, mixtures
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.runtime import hosts
from jaxrl_llm.runtime.json_lines import read_json, written
from jaxrl_llm.runtime.weights import is_run

MAX_FILE_BYTES = 5 * 10**9
MOST_MAPPED_BYTES = 2**26
# Dtypes of stored weights by their names in safetensors.
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
CODES = "U8"  # bytes of MXFP4 (mixtures)
# In a model with images: the prefix of the text model's tensors, and the prefix of tensors that text does not use.
OF_TEXT, OF_IMAGES = "model.language_model.", "model.visual."
CONFIGS = ("config.json", "adapter_config.json")  # a folder without these is not read as a model
# Subfolder of an unfinished export.
PARTIAL = ".partial"
# Files about tokenizer and sampling, which training does not change.
KEPT = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v*")
KEPT += ("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "vocab.bpe", "merges.txt")
KEPT += ("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja")
# Names of weight files, in exports and on the hub. Exports remove earlier ones.
_PART = f"{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", f"model-{_PART}", f"model.safetensors-{_PART}")


def numpy_dtypes() -> dict[str, np.dtype]:
    """Return the dtypes in which weights can be written, by numpy's name."""
    return {dtype.name: dtype for dtype in DTYPES.values()}


def downloaded(path: str, setting: str, allowed: str) -> str:
    """Download a model from the Hugging Face hub and return its folder.

    Args:
        path: the hub id.
        setting: the setting that has the id, for error messages.
        allowed: the values that the setting allows, for error messages.

    Raises:
        ConfigError: the hub cannot be reached, or it does not have the model.
    """
    import huggingface_hub

    try:
        wanted, copies = ["*.json", "*.safetensors", "*.jinja", *KEPT], ["*/*.safetensors", "consolidated*"]
        return huggingface_hub.snapshot_download(path, allow_patterns=wanted, ignore_patterns=copies)
    except Exception as error:  # from huggingface_hub, its HTTP client or the network: the model is not available
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{setting}={path!r} is no folder here and the Hugging Face hub did not give it ({reason}); "
            f"allowed: {allowed}"
        ) from error


def check_output(folder: str, flag: str) -> None:
    """Check that an export would not overwrite a run, or files that do not belong to a model.

    Args:
        flag: name of the flag that has the folder, for error messages.

    Raises:
        ConfigError: the export would overwrite such files.
    """
    if is_run(folder):
        raise ConfigError(f"{flag}={folder!r:.200} is the folder of a run, which a model would take the place of")
    there = _files(Path(folder), ("config.json", *WEIGHTS, *KEPT)) if os.path.isdir(folder) else []
    if there and not _is_of_model(Path(folder)):
        said = f"{flag}={folder!r:.200} has {there[0]} and is no model's folder"
        raise ConfigError(f"{said}: an export would write over such files, give it a folder of its own")


def _is_of_model(folder: Path) -> bool:
    """Return whether a folder holds a model, adapters, or the rest of an interrupted export."""
    if any((folder / name).exists() for name in (PARTIAL, "adapter_config.json", "adapter_model.safetensors")):
        return True
    with contextlib.suppress(ConfigError):
        return not {"architectures", "model_type"}.isdisjoint(read_json(folder / "config.json"))
    return False


def read_architecture(folder: str | Path) -> Architecture:
    """Return the architecture of the model in ``folder``, read from its config.json.

    Raises:
        ConfigError: no config.json, another kind of model, or a setting that the model code does not support.
    """
    path = Path(folder) / "config.json"
    return families.architecture_of(read_json(path), path)


def load_params(folder: str | Path, model: Model, mesh: Mesh) -> Params:
    """Read the parameters of ``folder`` directly onto their shards.

    Files may store float32, bfloat16, float16 or MXFP4.

    Raises:
        ConfigError: no safetensors, an unreadable file, or a tensor that is missing, unknown or of another shape.
    """
    file = _tensors(folder, model)
    _check_tied(file, model)
    return layout.load(file, families.names_of(model.arch), *_expected(model, mesh))


def check_weights(folder: str | Path, model: Model, mesh: Mesh) -> None:
    """Raise the ``ConfigError`` that ``load_params`` would raise, without loading the parameters.

    Only the files' headers are read, and embedding and head if they are tied and both are stored.
    """
    file = _tensors(folder, model)
    layout.check(file, families.names_of(model.arch), *_expected(model, mesh))
    _check_tied(file, model)


def _expected(model: Model, mesh: Mesh) -> tuple[Params, str]:
    """Return the shapes of the parameters, and a description of them for error messages."""
    return model.abstract_params(mesh), f"a model of the family {model.arch.family}"


def _tensors(folder: str | Path, model: Model) -> Folder | mixtures.Apart:
    file, family = Folder(Path(folder)), families.FAMILIES[model.arch.family]
    is_seen_apart = family.experts_together or family.experts_in_halves
    return mixtures.Apart(file, in_halves=family.experts_in_halves) if is_seen_apart else file


def _check_tied(file: Folder | mixtures.Apart, model: Model) -> None:
    """Check that a stored head equals the embedding if ``tie_word_embeddings`` is true.

    Raises:
        ConfigError: the two differ; transformers would then not tie them.
    """
    names = families.names_of(model.arch)
    table, head = names["embedding"], names["head"]
    if not model.arch.tied or head not in file.shapes or table not in file.shapes:
        return
    if not _are_same(file.path, file.modified_ns, head, table):
        raise ConfigError(
            f"{file.path}: tensor {head} differs from {table}; tie_word_embeddings=true must then be false"
        )


@functools.lru_cache(maxsize=4)
def _are_same(folder: str, modified_ns: tuple[int, ...], *names: str) -> bool:
    """Return whether two tensors are equal.

    The result is cached per modification time of the files, because a run checks before it compiles and when it loads.
    """
    file = Folder(Path(folder))
    head, table = names
    (rows, width), most = file.shapes[table], 4096
    parts = [(slice(start, min(start + most, rows)), slice(0, width)) for start in range(0, rows, most)]
    is_same = file.shapes[head] == file.shapes[table]
    return is_same and all(np.array_equal(file.read(head, part), file.read(table, part)) for part in parts)


class Folder:
    """Tensors of ``model.safetensors`` (or another ``name``), or of the files that its .index.json lists."""

    def __init__(self, folder: Path, name: str = "model.safetensors"):
        single, index = folder / name, folder / f"{name}.index.json"
        if single.exists():
            files = [single]
        elif index.exists():
            try:
                # Only the file names: an index must not refer to files in other folders.
                files = [folder / Path(name).name for name in sorted(set(read_json(index)["weight_map"].values()))]
            except (KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{index}: has no weight_map of tensor names to files") from error
        else:
            raise ConfigError(f"{folder}: neither {name} nor {name}.index.json is there")
        self.path = str(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}  # tensor -> dtype's name in safetensors
        self._paths: dict[str, Path] = {}  # tensor -> file
        self._names: dict[str, str] = {}  # tensor -> name in its file
        self._open: tuple[Any, Path | None] = (None, None)
        self._mapped_bytes = 0
        for path in files:
            if not os.path.isfile(path):
                raise ConfigError(f"{path}: no such file")
            try:
                file = safetensors.safe_open(path, framework="numpy")
            except (OSError, safetensors.SafetensorError) as error:
                raise ConfigError(f"{path}: not a readable safetensors file ({error})") from error
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                part = file.get_slice(name)
                # Not used here: a constant in old files, the small model that predicts further tokens, image tensors.
                if name.endswith("rotary_emb.inv_freq") or name.startswith(("mtp.", OF_IMAGES)):
                    continue
                stored, name = name, name.replace(OF_TEXT, "model.", 1) if name.startswith(OF_TEXT) else name
                if part.get_dtype() not in DTYPES and not (part.get_dtype() == CODES and mixtures.is_code(name)):
                    raise ConfigError(f"{path}: tensor {name} is {part.get_dtype()}; supported: {', '.join(DTYPES)}")
                if name in self.shapes:
                    raise ConfigError(f"{path}: tensor {name} is in another file too")
                self.shapes[name] = tuple(part.get_shape())
                self.dtypes[name], self._paths[name], self._names[name] = part.get_dtype(), path, stored
        self.modified_ns = tuple(os.stat(path).st_mtime_ns for path in files)

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        path, rows, shape = self._paths[name], index[0], self.shapes[name]
        # Pages that were read stay in memory while a file is mapped. Close the file from time to time, so that not the
        # whole model stays in memory.
        size = 1 if self.dtypes[name] == CODES else DTYPES[self.dtypes[name]].itemsize
        self._mapped_bytes += (rows.stop - rows.start) * math.prod(shape[1:]) * size
        if path != self._open[1] or self._mapped_bytes > MOST_MAPPED_BYTES:
            self._open = (None, None)
            self._open, self._mapped_bytes = (safetensors.safe_open(path, framework="numpy"), path), 0
        part = self._open[0].get_slice(self._names[name])[index]
        return part if self.dtypes[name] == CODES else part.astype(np.float32, copy=False)


def export(
    params: Params,
    model: Model,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    dtype: str = "",
) -> None:
    """Write a folder from which ``transformers.AutoModelForCausalLM.from_pretrained`` loads a model with equal logits.

    Files are first written to ``folder/.partial``. When all are complete, they are renamed into ``folder``, config.json
    last. An export that is interrupted while it writes therefore leaves the earlier files. A folder without config.json
    is not read as a model.

    Weights are split over files of at most 5 GB. The host holds one parameter of all layers at a time, or two if files
    have all experts of a layer in one tensor.

    Args:
        like: the Hugging Face folder of the original model. Its tokenizer, chat template and generation_config.json
            are copied byte for byte. Missing end tokens are added to generation_config.json. None: these files are
            written from ``tokenizer``.
        dtype: dtype of the weights, a key of ``numpy_dtypes()``. "": each tensor's dtype in ``like``, or float32.

    Raises:
        ConfigError: float16 cannot hold the weights.
    """
    tensors = _stored(params, model)
    if not hosts.is_first():
        for _, _, fetch in tensors:
            fetch()  # all hosts gather the arrays that are split over hosts
        return
    folder, kept = Path(folder), [] if like is None else _files(Path(like), KEPT)
    stored = {} if like is None or dtype else _dtypes(Path(like))
    usual = numpy_dtypes()[dtype or "float32"]
    dtype_of = lambda name: stored.get(name, stored.get(mixtures.name_together(name), usual))
    aside = folder / PARTIAL
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        bytes_of = _write_weights(tensors, aside, dtype_of)
        tokens = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids)}
        if like is None:
            tokenizer.save(aside)
        for path in kept:
            (aside / path).parent.mkdir(exist_ok=True)
            (aside / path).write_bytes((Path(like) / path).read_bytes())
        _write_ends(aside / "generation_config.json", tokens, tokenizer.pad_id)
        most = max(bytes_of, key=bytes_of.get)
        write_json(aside / "config.json", {**families.config_of(model.arch), "torch_dtype": most, **tokens})
        _take_place(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_ends(path: Path, tokens: dict[str, Any], pad_id: int | None) -> None:
    """Write the end tokens to a new or copied generation_config.json, because transformers reads them only there."""
    if not path.exists():
        return write_json(path, {**tokens, "pad_token_id": pad_id})
    kept, ends = read_json(path), tokens["eos_token_id"]
    stated = kept.get("eos_token_id")
    stated = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if not {*ends} <= {*stated}:
        write_json(path, {**kept, "eos_token_id": [*dict.fromkeys([*stated, *ends])]})


def _stored(params: Params, model: Model) -> Iterator[layout.Stored]:
    """Return every tensor of a folder, with the names and shapes of the model's family."""
    is_together = families.FAMILIES[model.arch.family].experts_together
    tensors = layout.stored_tensors(params, families.names_of(model.arch), num_held=1 + is_together)
    return mixtures.together(tensors, is_together=is_together)


def _dtypes(folder: Path) -> dict[str, np.dtype]:
    """Return the dtypes of a folder's tensors, by their names in an export.

    For MXFP4 this is bfloat16, which holds its numbers exactly.
    """
    found = {name.removesuffix("_blocks"): x for name, x in Folder(folder).dtypes.items()}
    return {name: DTYPES["BF16" if x == CODES else x] for name, x in found.items()}


def _files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the files of a folder that match ``names``, as paths relative to the folder."""
    return [path.relative_to(folder) for name in names for path in sorted(folder.glob(name)) if path.is_file()]


def _take_place(aside: Path, folder: Path) -> None:
    """Move the files of a finished export to its folder, after removing all files of an earlier export."""
    for old in _files(folder, (*CONFIGS, *WEIGHTS, *KEPT)):  # readers would mix files of two exports
        (folder / old).unlink()
    made = [path.relative_to(aside) for path in aside.rglob("*") if path.is_file()]
    for path in sorted(made, key=lambda path: path.name == "config.json"):
        (folder / path).parent.mkdir(exist_ok=True)
        os.replace(aside / path, folder / path)


def _write_weights(
    tensors: Iterator[layout.Stored], folder: Path, dtype_of: Callable[[str], np.dtype]
) -> dict[str, int]:
    """Write the weights, and return the number of bytes of each dtype."""
    files: list[dict] = [{}]
    filled, bytes_of, weight_map = 0, collections.Counter(), {}
    for name, shape, fetch in tensors:
        dtype = np.dtype(dtype_of(name))
        num_bytes = dtype.itemsize * math.prod(shape)
        if filled and filled + num_bytes > MAX_FILE_BYTES:
            files.append({})
            filled = 0
        files[-1][name] = (dtype, shape, fetch)
        filled += num_bytes
        bytes_of[dtype.name] += num_bytes
    for number, tensors in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_tensors(folder / file, tensors)
        weight_map.update(dict.fromkeys(tensors, file))
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(bytes_of.values())}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
    return bytes_of


def write_tensors(path: Path, tensors: dict[str, tuple[np.dtype, tuple[int, ...], Callable]]) -> None:
    """Write a safetensors file tensor by tensor, because the library would hold the whole file in memory, twice.

    The format is described in the README of safetensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    name_of, start = {np.dtype(dtype): name for name, dtype in DTYPES.items()}, 0
    for name, (dtype, shape, _) in tensors.items():
        end = start + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": name_of[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, _, fetch) in tensors.items():
            with np.errstate(over="ignore"):
                array = (value := fetch()).astype(dtype, copy=False)
            if dtype == np.float16 and not np.isfinite(array).all() and np.isfinite(value).all():
                raise ConfigError(f"tensor {name} has values over 65504, the largest of float16; bfloat16 holds them")
            file.write(array.view(np.uint8).data)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(written(value, indent=2) + "\n", encoding="utf-8")
