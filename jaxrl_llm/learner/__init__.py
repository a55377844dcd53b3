"""Scored rollouts become new weights."""
