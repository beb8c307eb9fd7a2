"""Caches, sessions and video streams."""
