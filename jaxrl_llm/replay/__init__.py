"""Replay: the ring of stored rollouts and the choice of rollouts for each update batch."""
