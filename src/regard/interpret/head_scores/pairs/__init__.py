"""What the pairs of one call add up to: from questions about it, or from blocks of its weights."""
