"""One file per system: each runs the same step in a process, and a virtual environment, of its own."""
