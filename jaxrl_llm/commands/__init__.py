"""The commands: one module per command of ``python -m jaxrl_llm.NAME``."""
