"""Checkpoints to and from the forms of others, without a job. No process group."""
