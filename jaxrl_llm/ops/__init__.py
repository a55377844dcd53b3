"""Pure mathematics on arrays. Imports jax, and jaxtyping for signatures; knows nothing of models, files or configs."""
