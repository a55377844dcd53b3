"""model.remat="auto":

a run uses the update that keeps the MLP activations if it fits, else the one that recomputes all.
"""

import types

import jax
import pytest
from support.building import ONE, TINY, mesh_of

from jaxrl_llm.config import freeze
from jaxrl_llm.learner.learner import LearnerPrograms
from jaxrl_llm.run import assemble
from jaxrl_llm.runtime.executables import keep_what_fits

RESIDENT, TEMPORARY = 100, {"dots": 200, "full": 50}


def executable(name, temporary):
    """Return a stand-in for a compiled program, with ``RESIDENT`` bytes of state in the compiler's report."""
    stats = types.SimpleNamespace(
        argument_size_in_bytes=RESIDENT,
        output_size_in_bytes=RESIDENT,
        temp_size_in_bytes=temporary,
        alias_size_in_bytes=RESIDENT,
        host_output_size_in_bytes=0,
    )
    return types.SimpleNamespace(name=name, memory_analysis=lambda: stats)


@pytest.fixture
def refused(monkeypatch):
    """Return programs of known sizes. The programs with the settings in this set do not compile."""
    refused = set()

    def programs(learner):
        remat = learner.update.model.remat

        def compile_it():
            if remat in refused:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.")
            return executable(remat, TEMPORARY[remat])

        lowered = types.SimpleNamespace(compile=compile_it)
        return {"update": types.SimpleNamespace(lower=lambda mesh: lowered)}

    monkeypatch.setattr(LearnerPrograms, "programs", programs)
    return refused


def taken(remat, limit):
    run = assemble(freeze({"model": {"remat": remat}}), TINY, (5,), mesh_of(ONE))
    first = run.learner.programs()["update"].lower(run.mesh).compile()
    compiled = {"init_state": executable("init_state", 0), "update": first}
    kept = keep_what_fits(run, compiled, limit)
    assert kept["init_state"] is compiled["init_state"]
    return kept["update"].name


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(301, "dots"), (300, "dots"), (299, "full"), (1, "full"), (None, "full")],
)
def test_the_update_that_keeps_the_mlps_is_taken_where_it_fits(refused, limit, expected):
    assert taken("auto", limit) == expected


def test_an_update_that_the_compiler_refuses_for_its_size_does_not_fit(refused):
    refused.add("dots")
    assert taken("auto", 1000) == "full"


def test_a_setting_other_than_auto_is_kept(refused):
    assert taken("dots", 1000) == "dots"
