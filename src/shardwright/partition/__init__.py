"""Which stage owns which module.

`tree` reads the modules, `trace` measures them, `cost` prices them, `assign` cuts (or `manual` obeys the
script), and `plan` is the result. `build.make_plan` does all of it.
"""

from __future__ import annotations

from shardwright.partition.build import make_plan
from shardwright.partition.manual import assigned_stage, partition, set_partition
from shardwright.partition.plan import PartitionPlan
from shardwright.partition.records import Trace
from shardwright.partition.trace import is_tracing
from shardwright.partition.tree import ModuleTree, build_tree

__all__ = [
    "ModuleTree",
    "PartitionPlan",
    "Trace",
    "assigned_stage",
    "build_tree",
    "is_tracing",
    "make_plan",
    "partition",
    "set_partition",
]
