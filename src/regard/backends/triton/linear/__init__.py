"""Linear attention: running sums of key-value products, a segment of tokens for each program."""
