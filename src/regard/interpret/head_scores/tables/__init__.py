"""What heads do as tables: their rows, the names of their scores, and one word for each head."""
