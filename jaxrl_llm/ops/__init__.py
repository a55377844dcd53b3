"""Pure mathematics on arrays. Imports jax alone; knows nothing of models, files or configs."""
