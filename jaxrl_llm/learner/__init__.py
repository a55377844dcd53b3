"""The learner: modules that turn scored rollouts into new weights."""
