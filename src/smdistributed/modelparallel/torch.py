"""Is `shardwright.torch`."""

from smdistributed.modelparallel._alias import become

become(__name__)
