"""How answers are scored: the rules that find the answer in a text."""
