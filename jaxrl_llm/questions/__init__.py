"""What is asked: where questions come from, their order, what is known of them."""
