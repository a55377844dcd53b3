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
    ],
)
def test_a_preset_has_the_parameters_of_its_model(name, parameters):
    model = presets.model_of(freeze({}), name)
    assert model.arch.num_params == parameters and model.reference == model.arch and model.eos_ids


def test_every_preset_has_its_count_tested():
    assert len(presets.PRESETS) == 7


def test_an_unknown_preset_and_a_teacher_beside_one_are_refused():
    with pytest.raises(ConfigError, match=r"--preset='gpt' must be one of smollm2-135m"):
        presets.model_of(freeze({}), "gpt")
    config = freeze({"model": {"reference_path": "random:debug"}, "algorithm": {"divergence": {"name": "reference"}}})
    with pytest.raises(ConfigError, match="reference_path must be ''"):
        presets.model_of(config, "llama-3.1-8b")
