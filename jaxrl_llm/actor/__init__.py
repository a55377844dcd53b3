"""Published weights and questions become scored rollouts."""
