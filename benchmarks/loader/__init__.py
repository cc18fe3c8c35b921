"""Loaders: samples in memory go through workers to a consumer in the parent."""
