"""Helpers for PyTorch."""
