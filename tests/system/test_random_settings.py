"""Runs with a few random settings combined: each is refused by name, or trains without a NaN."""

import pathlib
import random

import pytest
from support.building import settings_of
from test_config import ALIVE, FILES, SETTINGS

from jaxrl_llm.commands.train import train
from jaxrl_llm.config import ConfigError, freeze
from jaxrl_llm.reports.metrics import read_metrics

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "debug.py"
NUM_CHANGES = 4
NUM_ITERATIONS = 2
# Settings of other machines, of files or of other models than the debug config's.
LEFT_OUT = ("mesh.", "executables", "checkpoint.bucket", "compilation_cache", "model.path", "model.reference_path")
ALWAYS_FINITE = (
    "rollout/completion_length_tokens",
    "update/loss",
    "update/grad_norm",
    "update/entropy_nats",
    "time/iteration_s",
)


def drawn(seed, folder):
    """Return the debug config's settings with a few others, and those with what each needs."""
    chance = random.Random(seed)
    paths = [path for path in sorted(ALIVE) if not path.startswith(LEFT_OUT)]
    settings = dict(SETTINGS)
    for path in chance.sample(paths, NUM_CHANGES):
        other, _, given = ALIVE[path]
        settings |= given | {path: other}
    settings |= {"num_iterations": NUM_ITERATIONS, "metrics.tensorboard": False, "checkpoint.export": False}
    for name in ("prompts.name", "eval.name"):
        if settings.get(name) in FILES:
            (folder / settings[name]).write_text(FILES[settings[name]])
            settings[name] = str(folder / settings[name])
    return settings


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("seed", range(25))
def test_settings_drawn_at_random_are_refused_or_train(seed, tmp_path):
    settings = drawn(seed, tmp_path)
    try:
        status = train(freeze(settings_of(CONFIG, settings)), tmp_path / "run")
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return
    assert status == 0
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == NUM_ITERATIONS
    for row in rows:
        missing = [name for name in ALWAYS_FINITE if row.get(name) is None]
        assert not missing, settings
