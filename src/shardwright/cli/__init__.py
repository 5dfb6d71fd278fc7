"""The `shardwright` command."""
