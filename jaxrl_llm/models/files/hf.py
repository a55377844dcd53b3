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
DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
CODES = "U8"  # dtype of the bytes of MXFP4 codes (``mixtures``)
# Prefixes of names in a model with images. The image model's tensors are not read.
OF_TEXT = "model.language_model."
OF_IMAGES = "model.visual."
CONFIGS = ("config.json", "adapter_config.json")  # a folder without one of these files is not read as a model
# Subfolder of an unfinished export.
PARTIAL = ".partial"
# Files about tokenizer and sampling, which training does not change.
KEPT = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v*")
KEPT += ("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "vocab.bpe", "merges.txt")
KEPT += ("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja")
# Names of weight files, in exports and on the hub. Exports remove earlier ones.
_PART = f"{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    f"model-{_PART}",
    f"model.safetensors-{_PART}",
)


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

    model_files = ["*.json", "*.safetensors", "*.jinja", *KEPT]
    other_copies = ["*/*.safetensors", "consolidated*"]
    try:
        return huggingface_hub.snapshot_download(path, allow_patterns=model_files, ignore_patterns=other_copies)
    except Exception as error:  # from huggingface_hub, its HTTP client or the network: the model is not available
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{setting}={path!r} is not a folder here, and the download from the Hugging Face hub failed ({reason}); "
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
        raise ConfigError(
            f"{flag}={folder!r:.200} is the folder of a run. An export would replace its files: choose another folder"
        )
    if not os.path.isdir(folder):
        return
    existing = _files(Path(folder), ("config.json", *WEIGHTS, *KEPT))
    if existing and not _is_of_model(Path(folder)):
        raise ConfigError(
            f"{flag}={folder!r:.200} has {existing[0]} but no model. An export would overwrite that file: choose "
            "another folder"
        )


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
    """Return the shapes of the parameters, and the model's description for error messages."""
    return model.abstract_params(mesh), f"a model of the family {model.arch.family}"


def _tensors(folder: str | Path, model: Model) -> Folder | mixtures.Apart:
    """Return the tensors of a folder, with one tensor per matrix of an expert."""
    file = Folder(Path(folder))
    family = families.FAMILIES[model.arch.family]
    if family.experts_together or family.experts_in_halves:
        return mixtures.Apart(file, in_halves=family.experts_in_halves)
    return file


def _check_tied(file: Folder | mixtures.Apart, model: Model) -> None:
    """Check that a stored head equals the embedding if ``tie_word_embeddings`` is true.

    Raises:
        ConfigError: the two differ; transformers would then not tie them.
    """
    names = families.names_of(model.arch)
    table = names["embedding"]
    head = names["head"]
    if not model.arch.tied or head not in file.shapes or table not in file.shapes:
        return
    if not _are_same(file.path, file.modified_ns, head, table):
        raise ConfigError(
            f"{file.path}: tie_word_embeddings=true must be false, because tensor {head} differs from {table}"
        )


@functools.lru_cache(maxsize=4)
def _are_same(folder: str, modified_ns: tuple[int, ...], head: str, table: str) -> bool:
    """Return whether two tensors are equal.

    The result is cached per modification time of the files, because a run checks before it compiles and when it loads.
    """
    file = Folder(Path(folder))
    if file.shapes[head] != file.shapes[table]:
        return False
    num_rows, width = file.shapes[table]
    rows_per_part = 4096
    for start in range(0, num_rows, rows_per_part):
        part = (slice(start, min(start + rows_per_part, num_rows)), slice(0, width))
        if not np.array_equal(file.read(head, part), file.read(table, part)):
            return False
    return True


class Folder:
    """Tensors of ``model.safetensors`` (or another ``name``), or of the files that its .index.json lists."""

    def __init__(self, folder: Path, name: str = "model.safetensors"):
        files = _weight_files(folder, name)
        self.path = str(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}  # tensor -> dtype's name in safetensors
        self._paths: dict[str, Path] = {}  # tensor -> file
        self._names: dict[str, str] = {}  # tensor -> name in its file
        self._open: tuple[Any, Path | None] = (None, None)
        self._mapped_bytes = 0
        for path in files:
            self._read_header(path)
        self.modified_ns = tuple(os.stat(path).st_mtime_ns for path in files)

    def _read_header(self, path: Path) -> None:
        """Read the names, shapes and dtypes of the tensors in one file."""
        if not os.path.isfile(path):
            raise ConfigError(f"{path}: no such file")
        try:
            file = safetensors.safe_open(path, framework="numpy")
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(f"{path}: not a readable safetensors file ({error})") from error
        for stored_name in file.keys():  # noqa: SIM118  (not a mapping)
            # Tensors that this package does not read: a constant in old files, the small model that predicts further
            # tokens, image tensors.
            if stored_name.endswith("rotary_emb.inv_freq") or stored_name.startswith(("mtp.", OF_IMAGES)):
                continue
            name = stored_name
            if name.startswith(OF_TEXT):
                name = "model." + name.removeprefix(OF_TEXT)
            part = file.get_slice(stored_name)
            dtype = part.get_dtype()
            is_code = dtype == CODES and mixtures.is_code(name)
            if dtype not in DTYPES and not is_code:
                raise ConfigError(f"{path}: tensor {name} is {dtype}; supported: {', '.join(DTYPES)}")
            if name in self.shapes:
                raise ConfigError(f"{path}: tensor {name} is also stored in another file")
            self.shapes[name] = tuple(part.get_shape())
            self.dtypes[name] = dtype
            self._paths[name] = path
            self._names[name] = stored_name

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of one tensor in float32, or the bytes of MXFP4 codes."""
        path = self._paths[name]
        rows = index[0]
        is_code = self.dtypes[name] == CODES
        # Pages that were read stay in memory while a file is mapped. Close the file from time to time, so that memory
        # does not fill with the whole model.
        itemsize = 1 if is_code else DTYPES[self.dtypes[name]].itemsize
        self._mapped_bytes += (rows.stop - rows.start) * math.prod(self.shapes[name][1:]) * itemsize
        if path != self._open[1] or self._mapped_bytes > MOST_MAPPED_BYTES:
            self._open = (None, None)
            self._open = (safetensors.safe_open(path, framework="numpy"), path)
            self._mapped_bytes = 0
        part = self._open[0].get_slice(self._names[name])[index]
        return part if is_code else part.astype(np.float32, copy=False)


def _weight_files(folder: Path, name: str) -> list[Path]:
    """Return the file ``name`` of a folder, or the files that its .index.json lists."""
    single = folder / name
    index = folder / f"{name}.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ConfigError(f"{folder}: has neither {name} nor {name}.index.json")
    try:
        listed = sorted(set(read_json(index)["weight_map"].values()))
        # Use only the last part of each path, because an index must not refer to files in other folders.
        return [folder / Path(path).name for path in listed]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: has no weight_map from tensor names to files") from error


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
    folder = Path(folder)
    original = None if like is None else Path(like)
    original_dtypes = {} if original is None or dtype else _dtypes(original)
    default_dtype = numpy_dtypes()[dtype or "float32"]

    def dtype_of(name: str) -> np.dtype:
        together = original_dtypes.get(mixtures.name_together(name), default_dtype)
        return original_dtypes.get(name, together)

    partial = folder / PARTIAL
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        num_bytes = _write_weights(tensors, partial, dtype_of)
        main_dtype = max(num_bytes, key=lambda name: num_bytes[name])
        _write_settings(partial, model, tokenizer, original, main_dtype)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_settings(folder: Path, model: Model, tokenizer: Tokenizer, original: Path | None, dtype: str) -> None:
    """Write tokenizer, generation_config.json and config.json.

    Args:
        original: the folder whose tokenizer is copied; None = write the tokenizer.
        dtype: name of the dtype of most weights.
    """
    tokens = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.eos_ids),
    }
    if original is None:
        tokenizer.save(folder)
    else:
        _copy_kept(original, folder)
    _write_end_tokens(folder / "generation_config.json", tokens, tokenizer.pad_id)
    config = {**families.config_of(model.arch), "torch_dtype": dtype, **tokens}
    write_json(folder / "config.json", config)


def _copy_kept(source: Path, folder: Path) -> None:
    """Copy the files about tokenizer and sampling byte for byte."""
    for path in _files(source, KEPT):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes((source / path).read_bytes())


def _write_end_tokens(path: Path, tokens: dict[str, Any], pad_id: int | None) -> None:
    """Write the end tokens to a new or copied generation_config.json, because transformers reads them only there."""
    if not path.exists():
        write_json(path, {**tokens, "pad_token_id": pad_id})
        return
    config = read_json(path)
    stored_ids = config.get("eos_token_id")
    if stored_ids is None:
        stored_ids = []
    elif not isinstance(stored_ids, list):
        stored_ids = [stored_ids]
    end_ids = tokens["eos_token_id"]
    if not {*end_ids} <= {*stored_ids}:
        write_json(path, {**config, "eos_token_id": [*dict.fromkeys([*stored_ids, *end_ids])]})


def _stored(params: Params, model: Model) -> Iterator[layout.Stored]:
    """Return every tensor of a folder, with the names and shapes of the model's family."""
    is_together = families.FAMILIES[model.arch.family].experts_together
    tensors = layout.stored_tensors(params, families.names_of(model.arch), num_held=1 + is_together)
    return mixtures.together(tensors, is_together=is_together)


def _dtypes(folder: Path) -> dict[str, np.dtype]:
    """Return the dtypes of a folder's tensors, by their names in an export.

    For MXFP4 this is bfloat16, which holds its numbers exactly.
    """
    dtypes = {}
    for name, dtype in Folder(folder).dtypes.items():
        dtypes[name.removesuffix("_blocks")] = DTYPES["BF16" if dtype == CODES else dtype]
    return dtypes


def _files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the files of a folder that match ``names``, as paths relative to the folder."""
    paths = []
    for name in names:
        paths += [path.relative_to(folder) for path in sorted(folder.glob(name)) if path.is_file()]
    return paths


def _publish(partial: Path, folder: Path) -> None:
    """Move the files of a finished export to its folder, after removing all files of an earlier export."""
    # Remove earlier files, because readers would mix files of two exports.
    for old in _files(folder, (*CONFIGS, *WEIGHTS, *KEPT)):
        (folder / old).unlink()
    paths = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
    for path in sorted(paths, key=lambda path: path.name == "config.json"):
        (folder / path).parent.mkdir(exist_ok=True)
        os.replace(partial / path, folder / path)


def _write_weights(
    tensors: Iterator[layout.Stored], folder: Path, dtype_of: Callable[[str], np.dtype]
) -> dict[str, int]:
    """Write the weights, and return the number of bytes of each dtype."""
    files: list[dict[str, WrittenTensor]] = [{}]
    file_bytes = 0
    bytes_by_dtype: collections.Counter[str] = collections.Counter()
    for name, shape, fetch in tensors:
        dtype = np.dtype(dtype_of(name))
        num_bytes = dtype.itemsize * math.prod(shape)
        if file_bytes and file_bytes + num_bytes > MAX_FILE_BYTES:
            files.append({})
            file_bytes = 0
        files[-1][name] = (dtype, shape, fetch)
        file_bytes += num_bytes
        bytes_by_dtype[dtype.name] += num_bytes
    if len(files) == 1:
        write_tensors(folder / "model.safetensors", files[0])
        return bytes_by_dtype
    weight_map = {}
    for number, file_tensors in enumerate(files, start=1):
        file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_tensors(folder / file_name, file_tensors)
        weight_map.update(dict.fromkeys(file_tensors, file_name))
    index = {
        "metadata": {"total_size": sum(bytes_by_dtype.values())},
        "weight_map": weight_map,
    }
    write_json(folder / "model.safetensors.index.json", index)
    return bytes_by_dtype


WrittenTensor = tuple[np.dtype, tuple[int, ...], Callable[[], np.ndarray]]  # dtype, shape, function that fetches it


def write_tensors(path: Path, tensors: dict[str, WrittenTensor]) -> None:
    """Write a safetensors file tensor by tensor, because the library would hold the whole file in memory, twice.

    The format is described in the README of safetensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    dtype_names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    start = 0
    for name, (dtype, shape, _) in tensors.items():
        end = start + dtype.itemsize * math.prod(shape)
        header[name] = {
            "dtype": dtype_names[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, _, fetch) in tensors.items():
            value = fetch()
            with np.errstate(over="ignore"):
                array = value.astype(dtype, copy=False)
            if dtype == np.float16 and not np.isfinite(array).all() and np.isfinite(value).all():
                raise ConfigError(
                    f"tensor {name} has values above 65504, the largest number of float16. Export it as bfloat16"
                )
            file.write(array.view(np.uint8).data)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(written(value, indent=2) + "\n", encoding="utf-8")
