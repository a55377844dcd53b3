"""Pure functions of arrays, which import only jax and jaxtyping. They do not know models, files or configs."""
