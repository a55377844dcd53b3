"""What answers a policy besides a question's scorer: programs that it wrote, run behind walls."""
