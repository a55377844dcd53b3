"""Sweeps: many runs, one table of their metrics and one page."""
