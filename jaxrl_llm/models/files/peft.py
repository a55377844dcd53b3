"""Reading and writing of adapter folders in PEFT's format: adapter_config.json and adapter_model.safetensors.

Owns: the files of a folder. Needs neither torch nor peft. Does not know: the base's files, the computation of adapters.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.method_config import LORA_TARGETS, LoraConfig
from jaxrl_llm.models import lora
from jaxrl_llm.models.files import families, hf, hybrids, layout
from jaxrl_llm.models.files.source import Resolve, Source
from jaxrl_llm.models.files.tokenizer import Tokenizer
from jaxrl_llm.models.transformer import Model, Params
from jaxrl_llm.runtime import hosts
from jaxrl_llm.runtime.json_lines import read_json
from jaxrl_llm.runtime.weights import is_run
from jaxrl_llm.settings.schema import build

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# Keys that do not change the outputs of a loaded adapter. All keys outside INERT and READ must be absent or empty.
INERT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "peft_version", "inference_mode"),
    *("lora_dropout", "qalora_group_size", "target_modules", "exclude_modules", "eva_config", "loftq_config"),
    *("corda_config", "lora_ga_config", "runtime_config", "ensure_weight_tying", "megatron_core"),
}
READ = {
    "peft_type": "LORA",
    "r": None,
    "lora_alpha": 8,
    "use_rslora": False,
    "use_dora": False,
}
READ |= {"init_lora_weights": True}
PLACES = ("", "experts_")  # prefixes of a target's matrices: in the block, in each expert
MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}  # Mixtral's names for the matrices of an expert
# Values of init_lora_weights with which PEFT does not change the base.
INITS = (True, False, "gaussian", "orthogonal", "eva")
EMPTY_VALUES = (None, False, "none", {}, [])


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder has adapters and no model."""
    folder = Path(os.path.expanduser(folder))
    return os.path.isfile(folder / CONFIG) and not os.path.exists(folder / "config.json")


def _tensors(folder: str | Path) -> hf.Folder:
    """Return the tensors of a folder of adapters."""
    return hf.Folder(Path(os.path.expanduser(folder)), WEIGHTS)


def base_of(folder: str | Path) -> str:
    """Return path or name of the base in adapter_config.json.

    Raises:
        ConfigError: no base is named, or a revision other than main of a model on the hub.
    """
    path = Path(folder, CONFIG)
    config = read_json(path)
    name = config.get("base_model_name_or_path")
    revision = config.get("revision")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}: base_model_name_or_path={name!r:.200} must name the adapters' base")
    if revision not in (None, "", "main") and not os.path.isdir(os.path.expanduser(name)):
        raise ConfigError(
            f"{path}: revision={revision!r:.60} of {name!r:.200} must be 'main', the only revision that is loaded from "
            "the hub. Download the other revision, and set base_model_name_or_path to its folder"
        )
    return name


def read_config(folder: str | Path) -> LoraConfig:
    """Return rank, scale and targets of the adapters in ``folder``. The targets are read from the tensor names.

    Raises:
        ConfigError: files are missing, the method is not LoRA, or the model code does not support the variant.
    """
    path = Path(os.path.expanduser(folder), CONFIG)
    settings = READ | read_json(path)
    if settings["peft_type"] != "LORA":
        raise ConfigError(f"{path}: peft_type={settings['peft_type']!r:.60} is not supported; supported: 'LORA'")
    init = settings["init_lora_weights"]
    if init not in INITS:
        raise ConfigError(
            f"{path}: init_lora_weights={init!r:.60} is not supported, because it changes the base; supported: "
            f"{', '.join(map(repr, INITS))}"
        )
    for key, value in settings.items():
        if key not in INERT and key not in READ and value not in EMPTY_VALUES:
            raise ConfigError(f"{path}: {key}={value!r:.60} is not supported; supported: absent, null or false")
    modules = {name.rsplit(".", 3)[-3] for name in _tensors(folder).shapes if name.count(".") > 2}
    targets = [name for name in LORA_TARGETS if not modules.isdisjoint((f"{name}_proj", MIXTRAL.get(name)))]
    if not targets:
        supported = ", ".join(f"{name}_proj" for name in LORA_TARGETS)
        raise ConfigError(f"{Path(folder, WEIGHTS)}: has no adapters of the supported matrices: {supported}")
    if settings["r"] in (None, 0):
        raise ConfigError(f"{path}: r={settings['r']!r} must be at least 1")
    fields = {
        "rank": settings["r"],
        "alpha": settings["lora_alpha"],
        "rank_stabilised": settings["use_rslora"],
        "dora": settings["use_dora"],
        "targets": targets,
    }
    return build(LoraConfig, fields, f"{path}: ")


def check(model: Model, mesh: Mesh, path: str) -> None:
    """Check the LoRA settings, and the adapters in ``model.lora.path`` if it is set, without reading weights.

    Args:
        path: ``model.path``, the base.

    Raises:
        ConfigError: settings do not fit the model or the adapters, or a tensor is missing or has another shape.
    """
    config = model.lora
    if config.rank:
        _check_base(config, path)
        _check_targets(config, model)
    if not config.path:
        return
    stored = read_config(config.path)
    for name in ("rank", "alpha", "rank_stabilised", "dora", "targets"):
        value = getattr(config, name)
        stored_value = getattr(stored, name)
        is_same = {*value} == {*stored_value} if name == "targets" else value == stored_value
        if not is_same:
            raise ConfigError(
                f"model.lora.{name}={value!r} must be {stored_value!r}, the value of the adapters in "
                f"model.lora.path={config.path!r:.200}"
            )
    layout.check(_tensors(config.path), names_of(model), *_expected(model, mesh))


def _check_base(config: LoraConfig, path: str) -> None:
    """Check that ``model.path`` can be the base of adapters."""
    if is_run(path):
        raise ConfigError(
            f"model.path={path!r:.200} is a run. With model.lora.rank={config.rank} it must be a folder that adapters "
            "can name as their base: the folder hf of a run without adapters, or a folder from export --merge"
        )
    if is_adapter(path):
        raise ConfigError(
            f"model.path={path!r:.200} is a folder of adapters. With model.lora.rank={config.rank} it must be a base. "
            "To start from these adapters, set model.lora.path; or merge them first (export --merge)"
        )


def _check_targets(config: LoraConfig, model: Model) -> None:
    """Check that adapters of experts can be stored in PEFT's format, if the targets include experts."""
    if not {*config.targets} & {"gate", "up", "down"}:
        return
    if families.FAMILIES[model.arch.family].experts_together:
        reason = f"files of {model.arch.family} have no names for matrices of single experts or for their adapters"
    elif config.dora and model.arch.num_experts:
        reason = "with model.lora.dora=True, because PEFT stores no magnitudes for experts"
    else:
        return
    raise ConfigError(f"model.lora.targets={config.targets!r} must be among q, k, v, o: {reason}")


def load(folder: str | Path, model: Model, mesh: Mesh) -> Params:
    """Read the adapters of ``folder`` directly onto their shards. They are the first result of ``lora.split``.

    Raises:
        ConfigError: an unreadable file, or a tensor that is missing, unknown or of another shape.
    """
    return layout.load(_tensors(folder), names_of(model), *_expected(model, mesh))


def _expected(model: Model, mesh: Mesh) -> tuple[Params, str]:
    """Return the shapes of the model's adapters, and the adapters' description for error messages."""
    config = model.lora
    return lora.split(model.abstract_params(mesh))[0], f"adapters of {', '.join(config.targets)} of rank {config.rank}"


def begin(model: Model, mesh: Mesh, base: Params | None = None, *, seed: int) -> Params:
    """Return the adapters at the start of training: from ``model.lora.path``, or new ones (``lora.init``)."""
    if model.lora.path:
        return load(model.lora.path, model, mesh)
    return lora.init(model.abstract_params(mesh), model.lora, base, seed=seed)


def merged(path: str, resolve: Resolve, over: str = "") -> Source:
    """Return the source of the base with the adapters of the folder ``path``.

    The adapters are merged into their base when weights are loaded. The source's ``folder`` is the base's folder,
    because exports copy its files.

    Args:
        resolve: function that returns the source of the base.
        over: path or name of the base; "" = the base in adapter_config.json.

    Raises:
        ConfigError: the base does not exist, or it is a folder of adapters.
    """
    base_path = over or base_of(path)
    config = read_config(path)
    if is_adapter(base_path):
        raise ConfigError(
            f"{path}: the base {base_path!r:.200} is a folder of adapters. Merge them into their base first (export "
            "--merge)"
        )
    base = resolve(base_path, setting="--model" if over else f"{path}: base_model_name_or_path")

    def check_both(model: Model, mesh: Mesh) -> None:
        base.check_weights(model, mesh)
        adapted = dataclasses.replace(model, lora=config)
        layout.check(_tensors(path), names_of(model), *_expected(adapted, mesh))

    def load_both(model: Model, mesh: Mesh, *, seed: int) -> Params:
        adapted = dataclasses.replace(model, lora=config)
        adapters = load(path, adapted, mesh)
        base_params = base.load_params(model, mesh, seed=seed)
        return lora.merge(adapters, base_params, config)

    return dataclasses.replace(base, check_weights=check_both, load_params=load_both, is_merged=True)


def names_of(model: Model) -> dict[str, str]:
    """Return the tensor names of A, B and m for each matrix that can be a target."""
    base_names = families.names_of(model.arch)
    suffixes = {
        lora.A: "lora_A.weight",
        lora.B: "lora_B.weight",
        lora.M: "lora_magnitude_vector",
    }
    names: dict[str, str] = {}
    for target in LORA_TARGETS:
        for place in PLACES:
            path = f"blocks.{place}{target}"
            if path not in base_names:
                continue
            stem = "base_model.model." + base_names[path].removesuffix("weight")
            names |= {path + kind: stem + suffix for kind, suffix in suffixes.items()}
    if model.arch.delta:
        names = hybrids.by_layer(names, model.arch)
    return names | {"head": ""}


def check_folder(folder: Path) -> None:
    """Raise a ``ConfigError`` if the folder holds a model, because readers would then ignore the adapters."""
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} has a model (config.json). Choose another folder for the adapters")


def export(
    learned: Params,
    model: Model,
    tokenizer: Tokenizer,
    folder: str | Path,
    base: str,
    *,
    like: str | Path | None = None,
    dtype: str = "",
) -> None:
    """Write adapters in float32, so that ``peft.PeftModel.from_pretrained`` over the base has the same logits.

    Without adapters, ``hf.export`` writes the parameters. adapter_config.json is written last. An interrupted export
    therefore leaves a folder that is not read as adapters.

    Args:
        base: name of the base in adapter_config.json: ``model.path``.
        like, dtype: as for ``hf.export``; not used with adapters.

    Raises:
        ConfigError: the folder holds a model.
    """
    if not model.lora.rank:
        return hf.export(learned, model, tokenizer, folder, like=like, dtype=dtype)
    tensors = layout.stored_tensors(learned, names_of(model))
    arrays = {name: fetch() for name, _, fetch in tensors}  # all hosts gather the arrays that are split over hosts
    if not hosts.is_first():
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    check_folder(folder)
    (folder / CONFIG).unlink(missing_ok=True)
    written: dict[str, hf.WrittenTensor] = {}
    for name, array in arrays.items():
        written[name] = (array.dtype, array.shape, functools.partial(np.asarray, array))
    hf.write_tensors(folder / WEIGHTS, written)
    tokenizer.save(folder)
    config = model.lora
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.expanduser(base),
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,
        "use_rslora": config.rank_stabilised,
        "use_dora": config.dora,
        "target_modules": sorted({name.rsplit(".", 3)[-3] for name in arrays if name.endswith("weight")}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    hf.write_json(folder / CONFIG, settings)
