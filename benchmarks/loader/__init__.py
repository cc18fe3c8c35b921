"""Loaders: batches on their way from workers to a training step."""
