"""Samples, rendered scenes and clips, adapters to public data sets, and batches."""
