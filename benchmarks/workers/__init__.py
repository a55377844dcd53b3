"""Worker programs, one file per system. Each runs the same step in a separate process and virtual environment."""
