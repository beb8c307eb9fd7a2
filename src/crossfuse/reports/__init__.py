"""Pictures, charts and pages that show what was measured."""
