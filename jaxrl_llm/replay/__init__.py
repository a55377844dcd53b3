"""What is kept of rollouts, and which of it an update is given."""
