"""Reports of a run: its metrics, its live progress line and its HTML page."""
