"""Equal replicas: gradient reduction, first broadcast, global norms."""
