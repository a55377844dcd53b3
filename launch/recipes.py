"""Print the generated part of docs/reference/recipes.md: settings, source and differences of every recipe.

    python launch/recipes.py                  prints it
    python launch/recipes.py --write          puts it into docs/reference/recipes.md

Owns: the table's form, when a clip cannot act. Does not know: what the other settings mean.
"""

import argparse
import dataclasses
import importlib.util
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.inputs import Tokens
from jaxrl_llm.config import Config, freeze
from jaxrl_llm.settings.schema import differences

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "jaxrl_llm" / "recipes"
PAGE = REPOSITORY / "docs" / "reference" / "recipes.md"
BEGIN, END = "<!-- printed by python launch/recipes.py -->\n", "<!-- end -->"
NO_CLIP = (
    "Its clip cannot act: the one update of an iteration trains the weights that drew the rollouts, so every ratio is "
    "1. How to set [minibatches](../how-to/choose_a_method.md#minibatches)."
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe. Its docstring has the method's name first and ends with "Source: ... Differs: ..."."""

    file: str
    method: str
    about: str
    settings: str
    source: str
    differs: str
    clip: str


def read(path: pathlib.Path) -> Recipe:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Joined lines of each paragraph; the second one shows the command.
    head, _, tail = module.__doc__.strip().partition("\n\n")
    tail = " ".join(line.strip() for line in tail.splitlines() if not line.startswith("    "))
    about, _, source = tail.partition("Source: ")
    source, _, differs = source.partition("Differs: ")
    config = freeze(module.get_config())
    changed = differences(Config(), config, whole=True)
    settings = ", ".join(f"`{name}={shown(value)}`" for name, (_, value) in changed.items())
    return Recipe(
        file=path.stem,
        method=head.rstrip("."),
        about=about.strip(),
        settings=settings,
        source=source.strip().rstrip("."),
        differs=differs.strip().rstrip("."),
        clip=NO_CLIP if has_clip(config) and not clip_can_act(config) else "",
    )


def has_clip(config: Config) -> bool:
    """Return whether the surrogate bounds a ratio, or the critic how far a value moves."""
    algorithm, rows = config.algorithm, config.rollout.group_size
    zeros = jnp.zeros((rows, 1))
    tokens = Tokens(
        *(zeros, zeros, zeros, zeros),
        reward=jnp.zeros(rows),
        mask=jnp.ones((rows, 1), bool),
        group_size=rows,
        columns=dict.fromkeys(algorithm.surrogate.facts.columns, zeros),
    )
    terms = jax.eval_shape(lambda: algorithm.surrogate(tokens))
    return isinstance(terms, tuple) or (config.has_critic and algorithm.critic.clip > 0)


def clip_can_act(config: Config) -> bool:
    """Return whether an update can meet a token whose ratio to the old policy is not 1.

    Micro-batches are one update. Two or more updates of an iteration move the weights in between. In a single update
    the ratio is 1 if the old policy is the current one: "start" always is; "behaviour", "generation" and "interpolated"
    are for rollouts that the current weights drew. Ratios to the sampler's own log-probs also differ from 1 by rounding
    if sampler and learner round differently.
    """
    replay, old_policy = config.replay, config.algorithm.old_policy.name
    if config.update.updates_per_iteration > 1:
        return True
    if old_policy == "start":
        return False
    if old_policy not in ("behaviour", "generation", "interpolated"):
        return True
    has_older_rollouts = config.ring_capacity > config.rows_per_iteration and replay.fresh_fraction < 1
    spans_versions = config.rollout.lookahead_prompts > 0
    rounds = config.model.compute_dtype != "float32" or config.rollout.weights != "compute"
    return has_older_rollouts or spans_versions or (rounds and old_policy != "generation")


def shown(value: Any) -> str:
    """A setting's value; of functions their names and what of their settings is not the default."""
    return f"({', '.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def page() -> str:
    recipes = [read(path) for path in sorted(FOLDER.glob("[!_]*.py"))]
    lines = ["| recipe | method | settings that are not the default | source |", "|---|---|---|---|"]
    lines += [f"| `{r.file}` | {r.method} | {r.settings} | {r.source} |" for r in recipes]
    lines += ["", "### What each does, and where it differs from its paper", ""]
    for recipe in recipes:
        lines.append(f"- **{recipe.method}** (`{recipe.file}`). {recipe.about}")
        lines.append(f"  - Differs: {recipe.differs}." if recipe.differs else "  - Differs: its recipe names nothing.")
        if recipe.clip:
            lines.append(f"  - {recipe.clip}")
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """Return the text of the page with its generated part made anew."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + page() + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"put it into {PAGE.relative_to(REPOSITORY)} instead")
    if not parser.parse_args().write:
        print(page(), end="")
        return
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
