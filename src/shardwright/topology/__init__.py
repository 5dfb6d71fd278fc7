"""Which process this is: ranks, groups, devices, random streams."""
