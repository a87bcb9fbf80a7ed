"""Long runs in which much goes wrong, after which nothing is left behind."""
