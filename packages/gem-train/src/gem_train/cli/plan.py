"""`gem-train plan`: the recipe's model, described to gem_parallel's planner."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.resources
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import gem_parallel
from gem_data import SourceUnavailable
from gem_parallel import ModelSpec, NothingFitsError, Plan, Profile, Topology, start

from gem_train.config import RunConfig
from gem_train.data import open_data
from gem_train.errors import UserError, user_errors
from gem_train.events import finite
from gem_train.planning import as_toml, describe_model, settings, without_graphs


def plan(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Print the plan and return 0, or say by how much the closest layout misses and return 1."""
    with user_errors("plan"):
        machine = topology(arguments.topology)
        world = machine.tiers[-1].size if arguments.gpus is None else arguments.gpus
        batch = per_device(config.data.batch_size, world) if arguments.batch is None else arguments.batch
        profile = Profile.from_toml(arguments.profile) if arguments.profile else None
    with user_errors("data"), start("cpu") as runtime:
        try:
            data = open_data(config.data, runtime)
        except SourceUnavailable as error:
            raise UserError(str(error)) from error
        precision = config.train.precision
        if precision == "auto":
            precision = "bf16" if machine.device_memory else "fp32"
        spec = describe_model(config, data, precision=precision)
    strategies = ("v1", "v2", "v3") if arguments.inexact else ("v1", "v3")
    parts = arguments.parts or (config.optim.accumulate if config.optim.accumulate > 1 else None)
    if config.data.share_requests:  # samples that share a history cannot be divided
        parts = parts or 1

    def choose(model: ModelSpec) -> Plan:
        return gem_parallel.plan(
            model, machine, batch, parts=parts, world=world, profile=profile, strategies=strategies
        )

    notes = list(data.notes)
    with user_errors("plan"):
        if arguments.spec:
            Path(arguments.spec).write_text(as_toml(spec), encoding="utf-8")
        try:
            try:
                found = choose(spec)
            except NothingFitsError:
                launched = without_graphs(spec)
                if launched == spec:
                    raise
                found = choose(launched)
                notes.append("copies of parameters for CUDA graphs leave no room: planned without graphs")
        except NothingFitsError as error:
            print(f"gem-train: {error}", file=sys.stderr)
            return 1
    named = arguments.recipe or f"--config {arguments.config}"
    planned = [] if batch * world == config.data.batch_size else [f"data.batch_size={batch * world}"]
    planned += [*settings(found.layout), *([] if found.model == spec else ["train.cuda_graphs=off"])]
    keys = {setting.partition("=")[0] for setting in planned}
    more = [*(s for s in arguments.set if s.partition("=")[0] not in keys), *planned]
    run = " ".join([launcher(machine, world), "run", named, *(f"--set {shlex.quote(s)}" for s in more)])
    print(json.dumps(finite(dataclasses.asdict(found)), indent=2) if arguments.json else render(found, notes, run))
    return 0


def topology(name: str | None) -> Topology:
    """This machine (None), a file, or an example that comes with gem-parallel.

    Raises ValueError for a name that is neither.
    """
    if name is None:
        return Topology.detect()
    if Path(name).is_file():
        return Topology.from_toml(name)
    examples = importlib.resources.files("gem_parallel") / "examples"
    known = [f.name.removesuffix(".toml") for f in examples.iterdir() if f.name.endswith(".toml")]
    machines = sorted(n for n in known if not n.startswith("model-"))
    if name not in machines:
        raise ValueError(f"there is no topology file {name!r}, and no example of that name: {', '.join(machines)}")
    with importlib.resources.as_file(examples / f"{name}.toml") as path:
        return Topology.from_toml(path)


def per_device(batch_size: int, world: int) -> int:
    """Samples of a step on one of `world` devices. Raises ValueError where they can't be dealt out evenly."""
    if world < 1 or batch_size % world:
        raise ValueError(
            f"data.batch_size is {batch_size}, which {world} devices can't share evenly; "
            "set another one, or say --batch (samples per device)"
        )
    return batch_size // world


def launcher(machine: Topology, world: int) -> str:
    """gem-train on one device, or on every device of hosts that hold as many as the innermost tier."""
    if world == 1:
        return "gem-train"
    host = machine.tiers[0].size
    if world <= host:
        return f"torchrun --standalone --nproc_per_node {world} -m gem_train"
    return f"torchrun --nnodes {-(-world // host)} --nproc_per_node {host} -m gem_train"


def render(found: Plan, notes: Sequence[str], run: str) -> str:
    """The plan for a person, with what the planner was told and how to run it."""
    flops = found.model.flops / 1e6
    kept = sum(u.activation_bytes for u in found.model.units) / 2**20
    lines = [
        *(f"note: {note}" for note in notes),
        str(found),
        f"model      {found.model.dense_params:,} dense and {found.model.table_params:,} table parameters",
        f"           {flops:,.2f} MFLOP forward a sample (mean over training rows); {kept:,.2f} MiB kept (estimated)",
        f"run it     {run}",
    ]
    return "\n".join(lines)
