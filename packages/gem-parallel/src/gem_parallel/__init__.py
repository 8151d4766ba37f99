"""Topology, sharding of tables and dense parameters, and atomic checkpoints for jagged models.

Names are imported on first use, so that `import gem_parallel` needs neither torch nor torchrec.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gem_parallel.__about__ import __version__

if TYPE_CHECKING:
    from gem_parallel.checkpoint import Checkpointer, CheckpointError, PerRank
    from gem_parallel.config import ParallelConfig, RowWiseAdagrad, SparseSGD
    from gem_parallel.export import ExportError, export_tables
    from gem_parallel.mesh import make_mesh
    from gem_parallel.optimizer import load_optimizer_state, optimizer_groups, optimizer_state
    from gem_parallel.parallel import ParallelModel, parallelize
    from gem_parallel.planner import NothingFitsError, Plan, plan
    from gem_parallel.runtime import PeerLostError, Runtime, start
    from gem_parallel.simulator import Disturbance, Simulation, curve_table, scaling_curve, simulate
    from gem_parallel.spec import LayerSpec, ModelSpec, Profile, TableSpec
    from gem_parallel.tables import init_tables
    from gem_parallel.topology import Tier, Topology

_HOME = {
    "Checkpointer": "checkpoint",
    "CheckpointError": "checkpoint",
    "PerRank": "checkpoint",
    "ParallelConfig": "config",
    "RowWiseAdagrad": "config",
    "SparseSGD": "config",
    "ExportError": "export",
    "export_tables": "export",
    "make_mesh": "mesh",
    "load_optimizer_state": "optimizer",
    "optimizer_groups": "optimizer",
    "optimizer_state": "optimizer",
    "ParallelModel": "parallel",
    "parallelize": "parallel",
    "NothingFitsError": "planner",
    "Plan": "planner",
    "plan": "planner",
    "PeerLostError": "runtime",
    "Runtime": "runtime",
    "start": "runtime",
    "Disturbance": "simulator",
    "Simulation": "simulator",
    "curve_table": "simulator",
    "scaling_curve": "simulator",
    "simulate": "simulator",
    "LayerSpec": "spec",
    "ModelSpec": "spec",
    "Profile": "spec",
    "TableSpec": "spec",
    "init_tables": "tables",
    "Tier": "topology",
    "Topology": "topology",
}

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Disturbance",
    "ExportError",
    "LayerSpec",
    "ModelSpec",
    "NothingFitsError",
    "ParallelConfig",
    "ParallelModel",
    "PeerLostError",
    "PerRank",
    "Plan",
    "Profile",
    "RowWiseAdagrad",
    "Runtime",
    "Simulation",
    "SparseSGD",
    "TableSpec",
    "Tier",
    "Topology",
    "__version__",
    "curve_table",
    "export_tables",
    "init_tables",
    "load_optimizer_state",
    "make_mesh",
    "optimizer_groups",
    "optimizer_state",
    "parallelize",
    "plan",
    "scaling_curve",
    "simulate",
    "start",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"gem_parallel.{_HOME[name]}"), name)
    raise AttributeError(f"module 'gem_parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
