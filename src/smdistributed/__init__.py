"""The original's import path. Everything here is another name for something in `shardwright`."""
