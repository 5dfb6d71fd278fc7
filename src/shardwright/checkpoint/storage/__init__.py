"""Where the bytes of a checkpoint live."""
