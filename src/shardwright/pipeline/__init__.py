"""One program on every rank, placed values, a tape per microbatch."""
