"""Whether what heads write raises the token that they look at, read from where a model's form has
their weights."""
