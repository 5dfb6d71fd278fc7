"""One file for each family of distributed modules."""
