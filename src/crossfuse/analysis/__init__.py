"""Measurements on a model and its data."""
