"""Presets: shapes with as many parameters as the models' pages say."""

import pytest

from jaxrl_llm.config import ConfigError, freeze
from jaxrl_llm.planning import presets


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("smollm3-3b", 3_075_098_624),
        ("gemma-3-270m", 268_098_176),
        ("gemma-3-1b", 999_885_952),
        ("olmo-2-1b", 1_484_916_736),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_a_preset_has_the_parameters_of_its_model(name, parameters):
    model = presets.model_of(freeze({}), name)
    assert model.arch.num_params == parameters and model.reference == model.arch and model.eos_ids


def test_every_preset_has_its_count_tested():
    assert len(presets.PRESETS) == 26


def test_an_unknown_preset_and_a_teacher_beside_one_are_refused():
    with pytest.raises(ConfigError, match=r"--preset='gpt' must be one of smollm2-135m"):
        presets.model_of(freeze({}), "gpt")
    config = freeze({"model": {"reference_path": "random:debug"}, "algorithm": {"divergence": {"name": "reference"}}})
    with pytest.raises(ConfigError, match="reference_path must be ''"):
        presets.model_of(config, "llama-3.1-8b")
