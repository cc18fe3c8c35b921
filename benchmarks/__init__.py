"""Benchmarks: every comparison goes through ``_harness``; see README.md."""
