"""Half precision: which dtype has which role, fp32 master weights, and the loss scale."""
