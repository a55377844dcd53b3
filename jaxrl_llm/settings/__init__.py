"""How a mapping becomes settings: schemas, functions that users name, functions with settings."""
