"""What a method is: pure functions with their settings, on arrays."""
