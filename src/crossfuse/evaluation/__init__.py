"""Asking a model questions, keeping every answer, and scoring the answers in a separate step."""
