"""Environments that reply to a policy (mazes, word games, search, users), and the sandbox that runs its programs."""
