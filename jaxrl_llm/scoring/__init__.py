"""Scores of completions: reward functions, the worker processes that run them, and answers in texts."""
