"""A maze of a few turns, for a model of any size: GRPO on the task that the recipes for methods by turn begin with.

    python -m jaxrl_llm.train --config=configs/maze.py --workdir=runs/maze

A turn ends with a letter, the direction of the step. The reply is the field that the step reached and its exits. The
settings are in jaxrl_llm/examples/maze.py. Recipes such as gigpo replace GRPO by a method that compares turns.
"""

from jaxrl_llm.examples import maze

get_config = maze.get_config
