"""Calls that ranks share."""
