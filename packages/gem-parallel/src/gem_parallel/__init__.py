"""Topology, sharding of tables and dense parameters, and atomic checkpoints for jagged models.

Names are imported on first use, so that `import gem_parallel` needs neither torch nor torchrec.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gem_parallel.__about__ import __version__

if TYPE_CHECKING:
    from gem_parallel.checkpoint.export import ExportError, export_tables
    from gem_parallel.checkpoint.save import Checkpointer, CheckpointError, PerRank
    from gem_parallel.comm.exposed import Exposed
    from gem_parallel.comm.fsdp import Payload
    from gem_parallel.config import CommConfig, MemoryConfig, ParallelConfig, RowWiseAdagrad, SparseSGD
    from gem_parallel.dense.mesh import make_mesh
    from gem_parallel.dense.optimizer import load_optimizer_state, optimizer_groups, optimizer_state
    from gem_parallel.memory.plan import MemoryPlan
    from gem_parallel.memory.profile import declare_cost
    from gem_parallel.memory.quantise import Quantiser
    from gem_parallel.memory.recipes import Recipe, declare_again
    from gem_parallel.memory.regions import Regions
    from gem_parallel.parallel import ParallelModel, parallelize
    from gem_parallel.planning.layout import Layout
    from gem_parallel.planning.planner import NothingFitsError, Plan, plan, predict
    from gem_parallel.planning.profile import Profile
    from gem_parallel.planning.simulator import Disturbance, Simulation, curve_table, scaling_curve, simulate
    from gem_parallel.planning.spec import LayerSpec, ModelSpec, TableSpec
    from gem_parallel.planning.topology import Tier, Topology
    from gem_parallel.runtime import PeerLostError, Runtime, start
    from gem_parallel.sparse.initial import init_tables

_HOME = {
    "Checkpointer": "checkpoint.save",
    "CheckpointError": "checkpoint.save",
    "PerRank": "checkpoint.save",
    "CommConfig": "config",
    "MemoryConfig": "config",
    "ParallelConfig": "config",
    "RowWiseAdagrad": "config",
    "SparseSGD": "config",
    "ExportError": "checkpoint.export",
    "export_tables": "checkpoint.export",
    "Exposed": "comm.exposed",
    "Payload": "comm.fsdp",
    "MemoryPlan": "memory.plan",
    "Quantiser": "memory.quantise",
    "Recipe": "memory.recipes",
    "declare_again": "memory.recipes",
    "declare_cost": "memory.profile",
    "Regions": "memory.regions",
    "make_mesh": "dense.mesh",
    "load_optimizer_state": "dense.optimizer",
    "optimizer_groups": "dense.optimizer",
    "optimizer_state": "dense.optimizer",
    "ParallelModel": "parallel",
    "parallelize": "parallel",
    "Layout": "planning.layout",
    "NothingFitsError": "planning.planner",
    "Plan": "planning.planner",
    "plan": "planning.planner",
    "predict": "planning.planner",
    "PeerLostError": "runtime",
    "Runtime": "runtime",
    "start": "runtime",
    "Disturbance": "planning.simulator",
    "Simulation": "planning.simulator",
    "curve_table": "planning.simulator",
    "scaling_curve": "planning.simulator",
    "simulate": "planning.simulator",
    "LayerSpec": "planning.spec",
    "ModelSpec": "planning.spec",
    "Profile": "planning.profile",
    "TableSpec": "planning.spec",
    "init_tables": "sparse.initial",
    "Tier": "planning.topology",
    "Topology": "planning.topology",
}

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "CommConfig",
    "Disturbance",
    "ExportError",
    "Exposed",
    "LayerSpec",
    "Layout",
    "MemoryConfig",
    "MemoryPlan",
    "ModelSpec",
    "NothingFitsError",
    "ParallelConfig",
    "ParallelModel",
    "Payload",
    "PeerLostError",
    "PerRank",
    "Plan",
    "Profile",
    "Quantiser",
    "Recipe",
    "Regions",
    "RowWiseAdagrad",
    "Runtime",
    "Simulation",
    "SparseSGD",
    "TableSpec",
    "Tier",
    "Topology",
    "__version__",
    "curve_table",
    "declare_again",
    "declare_cost",
    "export_tables",
    "init_tables",
    "load_optimizer_state",
    "make_mesh",
    "optimizer_groups",
    "optimizer_state",
    "parallelize",
    "plan",
    "predict",
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
