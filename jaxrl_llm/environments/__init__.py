"""What answers a policy besides a question's scorer: mazes, word games, search, users; its programs, behind walls."""
