"""The ways in which ranks share a call: by heads, by gathered keys, or with keys that go round."""
