"""Which stage owns which module."""
