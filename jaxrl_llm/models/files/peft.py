"""Reading and writing of adapter folders in PEFT's format: adapter_config.json and adapter_model.safetensors.

Owns: the files of a folder. Needs neither torch nor peft. Does not know: the base's files, the computation of adapters.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

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

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Keys that do not change the outputs of a loaded adapter. Keys in neither INERT nor READ must be absent or empty.
INERT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "peft_version", "inference_mode"),
    *("lora_dropout", "qalora_group_size", "target_modules", "exclude_modules", "eva_config", "loftq_config"),
    *("corda_config", "lora_ga_config", "runtime_config", "ensure_weight_tying", "megatron_core"),
}
READ = {"peft_type": "LORA", "r": None, "lora_alpha": 8, "use_rslora": False, "use_dora": False}
READ |= {"init_lora_weights": True}
PLACES = ("", "experts_")  # prefixes of a target's matrices: in the block, in each expert
MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}  # Mixtral's names for the matrices of an expert
# Values of init_lora_weights with which PEFT does not change the base.
INITS = (True, False, "gaussian", "orthogonal", "eva")
NOTHING = (None, False, "none", {}, [])


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder has adapters and no model."""
    folder = Path(os.path.expanduser(folder))
    return os.path.isfile(folder / CONFIG) and not os.path.exists(folder / "config.json")


def _tensors(folder: str | Path) -> hf.Folder:
    return hf.Folder(Path(os.path.expanduser(folder)), WEIGHTS)


def base_of(folder: str | Path) -> str:
    """Return path or name of the base in adapter_config.json.

    Raises:
        ConfigError: no base is named, or a revision other than main of a model on the hub.
    """
    said = read_json(Path(folder, CONFIG))
    name, version = said.get("base_model_name_or_path"), said.get("revision")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{Path(folder, CONFIG)}: base_model_name_or_path={name!r:.200} must name the adapters' base")
    if version not in (None, "", "main") and not os.path.isdir(os.path.expanduser(name)):
        raise ConfigError(
            f"{Path(folder, CONFIG)}: revision={version!r:.60} of {name!r:.200} is not loaded from the hub, only "
            "'main' is: download it, and name its folder as base_model_name_or_path"
        )
    return name


def read_config(folder: str | Path) -> LoraConfig:
    """Return rank, scale and targets of the adapters in ``folder``. The targets are read from the tensor names.

    Raises:
        ConfigError: files are missing, the method is not LoRA, or the model code does not support the variant.
    """
    path = Path(os.path.expanduser(folder), CONFIG)
    given = READ | read_json(path)
    if given["peft_type"] != "LORA":
        raise ConfigError(f"{path}: peft_type={given['peft_type']!r:.60} is not supported; supported: 'LORA'")
    if given["init_lora_weights"] not in INITS:
        raise ConfigError(f"{path}: init_lora_weights={given['init_lora_weights']!r:.60} changes the base")
    for key, value in given.items():
        if key not in INERT and key not in READ and value not in NOTHING:
            raise ConfigError(f"{path}: {key}={value!r:.60} is not supported; supported: absent, null or false")
    modules = {name.rsplit(".", 3)[-3] for name in _tensors(folder).shapes if name.count(".") > 2}
    targets = [name for name in LORA_TARGETS if not modules.isdisjoint((f"{name}_proj", MIXTRAL.get(name)))]
    if not targets:
        known = ", ".join(f"{name}_proj" for name in LORA_TARGETS)
        raise ConfigError(f"{Path(folder, WEIGHTS)}: has adapters of none of {known}")
    if given["r"] in (None, 0):
        raise ConfigError(f"{path}: r={given['r']!r} must be at least 1")
    found = {"rank": given["r"], "alpha": given["lora_alpha"], "rank_stabilised": given["use_rslora"]}
    return build(LoraConfig, {**found, "dora": given["use_dora"], "targets": targets}, f"{path}: ")


def check(model: Model, mesh: Mesh, path: str) -> None:
    """Check the LoRA settings, and the adapters in ``model.lora.path`` if it is set, without reading weights.

    Args:
        path: ``model.path``, the base.

    Raises:
        ConfigError: settings do not fit the model or the adapters, or a tensor is missing or has another shape.
    """
    config = model.lora
    if config.rank and is_run(path):
        raise ConfigError(
            f"model.path={path!r:.200} is a run; with model.lora.rank={config.rank} it must be a folder that adapters "
            "can name as their base: the hf that a run without adapters leaves, or one of export --merge"
        )
    if config.rank and is_adapter(path):
        raise ConfigError(
            f"model.path={path!r:.200} is a folder of adapters; with model.lora.rank={config.rank} it must be their "
            "base: start from them with model.lora.path, or merge them (export --merge)"
        )
    together = families.FAMILIES[model.arch.family].experts_together
    has_none = together or (config.dora and model.arch.num_experts)
    if config.rank and has_none and {*config.targets} & {"gate", "up", "down"}:
        why = f"files of {model.arch.family} name no matrix of an expert, nor would its adapters have a name"
        why = why if together else "with model.lora.dora=True, for PEFT's experts have no magnitudes"
        raise ConfigError(f"model.lora.targets={config.targets!r} must be among q, k, v, o: {why}")
    if not config.path:
        return
    found = read_config(config.path)
    for name in ("rank", "alpha", "rank_stabilised", "dora", "targets"):
        own, there = getattr(config, name), getattr(found, name)
        if own != there and not (name == "targets" and {*own} == {*there}):
            raise ConfigError(
                f"model.lora.{name}={own!r} must be {there!r}, as model.lora.path={config.path!r:.200} has it"
            )
    layout.check(_tensors(config.path), names_of(model), *_expected(model, mesh))


def load(folder: str | Path, model: Model, mesh: Mesh) -> Params:
    """Read the adapters of ``folder`` directly onto their shards. They are the first result of ``lora.split``.

    Raises:
        ConfigError: an unreadable file, or a tensor that is missing, unknown or of another shape.
    """
    return layout.load(_tensors(folder), names_of(model), *_expected(model, mesh))


def _expected(model: Model, mesh: Mesh) -> tuple[Params, str]:
    """Return the shapes of the model's adapters, and a description of them for error messages."""
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
    named, config = over or base_of(path), read_config(path)
    if is_adapter(named):
        raise ConfigError(f"{path}: the base {named!r:.200} is adapters itself; merge those first (export --merge)")
    base = resolve(named, setting="--model" if over else f"{path}: base_model_name_or_path")

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
    of_base = families.names_of(model.arch)
    stem = lambda name: "base_model.model." + of_base[f"blocks.{name}"].removesuffix("weight")
    kinds = ((lora.A, "lora_A.weight"), (lora.B, "lora_B.weight"), (lora.M, "lora_magnitude_vector"))
    matrices = [of + name for name in LORA_TARGETS for of in PLACES if f"blocks.{of}{name}" in of_base]
    names = {f"blocks.{name}{kind}": stem(name) + end for name in matrices for kind, end in kinds}
    return (hybrids.by_layer(names, model.arch) if model.arch.delta else names) | {"head": ""}


def check_folder(folder: Path) -> None:
    """Raise a ``ConfigError`` if the folder holds a model: readers would take the adapters for this model."""
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds a model (config.json); adapters need a folder of their own")


def export(learned: Params, model: Model, tokenizer: Tokenizer, folder: str | Path, base: str, **like: Any) -> None:
    """Write adapters in float32, so that ``peft.PeftModel.from_pretrained`` over the base has the same logits.

    Without adapters, ``hf.export`` writes the parameters. adapter_config.json is written last. An interrupted export
    therefore leaves a folder that is not read as adapters.

    Args:
        base: name of the base in adapter_config.json: ``model.path``.
        like: further arguments of ``hf.export``.

    Raises:
        ConfigError: the folder holds a model.
    """
    if not model.lora.rank:
        return hf.export(learned, model, tokenizer, folder, **like)
    tensors = layout.stored_tensors(learned, names_of(model))
    arrays = {name: fetch() for name, _, fetch in tensors}  # all hosts gather the arrays that are split over hosts
    if not hosts.is_first():
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    check_folder(folder)
    (folder / CONFIG).unlink(missing_ok=True)
    hf.write_tensors(folder / WEIGHTS, {name: (x.dtype, x.shape, lambda x=x: x) for name, x in arrays.items()})
    tokenizer.save(folder)
    config = model.lora
    said: dict[str, Any] = {
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
    hf.write_json(folder / CONFIG, said)
