"""Descriptions of sharded tensors."""
