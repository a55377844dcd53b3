"""The report of what a run enters: benchmarks/entered.py."""

import pathlib

from benchmarks import entered
from jaxrl_llm.config import SamplingConfig
from jaxrl_llm.ops import filters
from jaxrl_llm.settings import schema


def test_a_function_that_is_called_is_entered_and_another_of_the_same_module_is_not():
    by_name = {f.name: f for f in entered.functions_of(pathlib.Path(schema.__file__))}
    with entered.traced() as seen:
        schema.flatten(SamplingConfig())
    called = by_name["flatten"]
    assert (called.path, called.first_line) in seen
    assert not any(path == filters.__file__ for path, _ in seen)
    lines = entered.table(seen)
    row = next(line for line in lines if line.startswith("jaxrl_llm/settings "))
    modules, functions = row.split()[1:]
    assert modules.startswith("1/") and int(functions.partition("/")[0]) < len(by_name)
