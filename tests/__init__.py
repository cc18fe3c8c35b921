"""A package, so that no other module of this name hides ``tests.support``."""
