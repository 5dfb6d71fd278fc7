"""Helpers that the original kept beside its tests."""
