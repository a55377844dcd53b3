"""The likelihood of a question given its answer, compared with a transformer of float64 loops."""

import math

import jax
import numpy as np
import pytest
from reference import transformer

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.models.files import pretrained
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.runtime import sharding
from jaxrl_llm.scoring import likelihood


def test_the_reward_is_the_mean_probability_of_the_question(monkeypatch):
    monkeypatch.setenv("JAXRL_LIKELIHOOD_MODEL", "random:debug")
    monkeypatch.setattr(likelihood, "ASKED", "{answer}?")  # short rows: one program
    prompts = ["sum", [{"role": "system", "content": "Be"}, {"role": "user", "content": "a sum"}], "sum"]
    completions = ["4", "it is 4", ""]
    got = likelihood.reward(prompts, completions, answer=["4"] * 3)
    source = pretrained.resolve("random:debug")
    model, tokenizer = Model(source.architecture()), source.tokenizer()
    params = source.load_params(model, sharding.make_mesh(MeshConfig(), jax.devices()[:1]), seed=0)
    for reward, question, said in zip(got, ("sum", "a sum", "sum"), completions, strict=True):
        asked = tokenizer.encode_prompt(f"{said}?", chat_template=True, system_prompt="")
        row = np.array(asked + tokenizer.encode(question))
        logp = transformer.completion_logp(jax.device_get(params), model.arch, row, len(asked), len(row))
        mean = math.fsum(logp[len(asked) :]) / len(tokenizer.encode(question))
        assert reward == pytest.approx(math.exp(mean), rel=1e-5)
    with pytest.warns(UserWarning, match="tokens, and JAXRL_LIKELIHOOD_MODEL='random:debug' takes"):
        both = likelihood.reward(["sum"] * 2, ["b" * 100_000, "4"])
    assert both == [None, got[0]]  # the other of its group is scored
