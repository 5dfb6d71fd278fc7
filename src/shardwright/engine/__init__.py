"""The only place where the techniques meet."""
