"""Files that hold all experts of a layer in one tensor.

The tensors are plain or MXFP4. test_families compares whole models with transformers.
"""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from support import building, families
from support.building import CUBE, ONE
from support.refusal import raises_with

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files import hf, mixtures
from jaxrl_llm.models.files.gguf import make_byte_tokenizer
from jaxrl_llm.models.transformer import Model

# By the specification's table of FP4 (E2M1).
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
E, WIDTH, FFN = 3, 64, 32
CONFIG = families.of(
    **dict(model_type="gpt_oss", hidden_size=WIDTH, intermediate_size=FFN, num_local_experts=E, num_experts_per_tok=2),
    **dict(head_dim=4, num_attention_heads=4, num_hidden_layers=2, sliding_window=5, swiglu_limit=7.0),
    quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
)
EXPERTS = "model.layers.1.mlp.experts."


def released(folder, **changes):
    """Return a folder in GPT-OSS's released form, and its tensors."""
    rng, plain = np.random.default_rng(3), folder.parent / "plain"
    config = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    model = Model(hf.read_architecture(plain))
    hf.export(building.learner_params(model, building.mesh_of(ONE)), model, make_byte_tokenizer(), plain)
    stored = safetensors.numpy.load_file(plain / "model.safetensors")
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in stored.items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        _, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (E, outputs, inputs // 32, 16)).astype(np.uint8)
        tensors[f"{name}_scales"] = rng.integers(120, 126, (E, outputs, inputs // 32)).astype(np.uint8)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    safetensors.numpy.save_file(tensors | changes, folder / "model.safetensors")
    return tensors


def decode(blocks, scales):
    """Decode [O,G,16] and [O,G], number by number, to [O,32 G]."""
    out = np.zeros((*scales.shape, 32))
    for place in np.ndindex(blocks.shape):
        o, g, byte = place
        for half in range(2):
            bits = blocks[place] // 16 if half else blocks[place] % 16
            out[o, g, 2 * byte + half] = VALUES[bits] * 2.0 ** (float(scales[o, g]) - 127)
    return out.reshape(len(out), -1)


def test_a_byte_of_mxfp4_is_two_numbers():
    blocks, scales = np.zeros((1, 2, 16), np.uint8), np.array([[127, 129]], np.uint8)
    blocks[0, 0, 0], blocks[0, 1, 15] = 0x92, 0x7F  # bits 2 and 9; 15 and 7
    found = mixtures.decoded(blocks, scales)
    expected = np.zeros((1, 64))
    expected[0, :2], expected[0, -2:] = (1.0, -0.5), (-6.0 * 4, 6.0 * 4)
    np.testing.assert_array_equal(found, expected)


def test_a_released_folder_is_read_and_exported_as_what_it_stands_for(tmp_path):
    tensors = released(tmp_path / "released")
    model = Model(hf.read_architecture(tmp_path / "released"))
    hf.check_weights(tmp_path / "released", model, building.mesh_of(ONE))
    params = hf.load_params(tmp_path / "released", model, building.mesh_of(ONE))
    gates_and_ups, down = (
        [decode(tensors[f"{EXPERTS}{name}_blocks"][e], tensors[f"{EXPERTS}{name}_scales"][e]) for e in range(E)]
        for name in ("gate_up_proj", "down_proj")
    )
    blocks = params["blocks"]
    for e in range(E):
        np.testing.assert_array_equal(blocks["experts_gate"][1, e], gates_and_ups[e][::2])
        np.testing.assert_array_equal(blocks["experts_up"][1, e], gates_and_ups[e][1::2])
        np.testing.assert_array_equal(blocks["experts_down"][1, e], down[e])
    sharded = hf.load_params(tmp_path / "released", model, building.mesh_of(CUBE))  # parts of 32 numbers among them
    jax.tree.map(np.testing.assert_array_equal, sharded, params)
    hf.export(params, model, make_byte_tokenizer(), tmp_path / "ours", like=tmp_path / "released")
    ours = safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors")
    assert {x.dtype for x in ours.values()} == {np.dtype(ml_dtypes.bfloat16)}
    turned = np.stack([x.T for x in gates_and_ups]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(ours[f"{EXPERTS}gate_up_proj"], turned)
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "shape"),
    [("down_proj_blocks", (E, WIDTH, 1, 8)), ("down_proj_scales", (E, WIDTH, 2)), ("gate_up_proj_bias", (E,))],
)
def test_tensors_that_no_experts_are_shaped_like_are_refused(tmp_path, name, shape):
    released(tmp_path / "released", **{EXPERTS + name: np.zeros(shape, np.uint8 if "bias" not in name else np.float32)})
    model = Model(hf.read_architecture(tmp_path / "released"))
    with raises_with(ConfigError, name, "shape"):
        hf.check_weights(tmp_path / "released", model, building.mesh_of(ONE))


def test_a_scale_that_means_no_number_is_refused(tmp_path):
    released(tmp_path / "released", **{f"{EXPERTS}down_proj_scales": np.full((E, WIDTH, 1), 255, np.uint8)})
    model = Model(hf.read_architecture(tmp_path / "released"))
    with raises_with(ConfigError, "down_proj", "NaN"):
        hf.load_params(tmp_path / "released", model, building.mesh_of(ONE))


@pytest.mark.torch
def test_transformers_decodes_the_same():
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (2, 6, 3, 16)), rng.integers(100, 140, (2, 6, 3))
    blocks, scales = blocks.astype(np.uint8), scales.astype(np.uint8)
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    ours = np.stack([mixtures.decoded(*x) for x in zip(blocks, scales, strict=True)])
    np.testing.assert_array_equal(ours.swapaxes(1, 2), theirs.numpy())
