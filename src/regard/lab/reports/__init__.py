"""What experiments found: whether each part of a claim holds, in words, and drawn."""
