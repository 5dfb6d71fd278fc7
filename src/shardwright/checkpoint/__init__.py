"""Saving and loading training state."""
