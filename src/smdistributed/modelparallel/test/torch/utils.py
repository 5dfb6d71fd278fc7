"""Is `shardwright.torch.debugging`."""

from smdistributed.modelparallel._alias import become

become(__name__)
