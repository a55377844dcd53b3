"""Example tasks and environments. The core imports none of them; they are found by name at run time."""
