"""Trained models for regard: folders beside this file, found by name and never imported."""
