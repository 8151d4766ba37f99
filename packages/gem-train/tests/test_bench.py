"""The bench: that its parts add up, that figures have their numerators, and that the planner reads its profile."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from gem_model.flops import unit_flops
from gem_parallel import Profile
from gem_train.cli import main
from gem_train.config import to_toml
from gem_train.measuring import alone, kernels
from gem_train.measuring.batches import half_filled
from gem_train.measuring.bench import PARTS, waterfall
from gem_train.measuring.recompute import recompute
from gem_train.measuring.table import render
from gem_train.measuring.waterfall import OPTIMIZER, RECOMPUTATION, STEP, _union, of_a_step, split, trace_step
from gem_train.metrics import PEAK_TFLOPS, peak_flops
from gem_train.report.figures import imbalance
from gem_train.testing import assembled, tiny_config


def event(name, ts, dur, cat="kernel"):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat}


def test_the_parts_of_a_step_are_what_each_instant_belongs_to():
    """A trace made by hand, in microseconds, whose answer can be read off."""
    events = [
        event(STEP, 100, 100, "user_annotation"),
        event(STEP, 100, 90, "gpu_user_annotation"),
        event("ampere_gemm", 90, 30),  # 100-120 layers; the rest lies before the step
        event("ncclDevKernel_AllGather", 110, 30),  # 120-140 exposed
        event("vectorized_elementwise", 140, 20),  # 140-160, of which recomputation 140-150 by its annotation
        event(RECOMPUTATION, 135, 20, "gpu_user_annotation"),
        event("split_embedding_nobag_forward", 165, 5),  # 165-170 tables
        event("multi_tensor_apply", 170, 10),  # 170-180 optimizer
        event("ampere_gemm", 172, 3),  # inside the optimizer's span and annotation
        event(OPTIMIZER, 170, 12, "gpu_user_annotation"),
        event("ncclDevKernel_AllReduce", 171, 4),  # hidden behind compute
        event("aten::mm", 100, 100, "cpu_op"),  # the host is not looked at
    ]
    found = split({"traceEvents": events}, cuda=True)
    expected = {"layers": 20, "communication": 20, "recomputation": 20, "tables": 5, "optimizer": 10, "gaps": 25}
    assert {k: round(v * 1e6, 6) for k, v in found.items()} == {**expected, "step": 100}


def test_without_kernels_the_annotations_decide():
    events = [
        event(STEP, 0, 100, "user_annotation"),
        event("gloo:all_reduce", 10, 10, "user_annotation"),
        event("fbgemm::split_embedding_codegen_lookup", 20, 5, "cpu_op"),
        event(OPTIMIZER, 80, 15, "user_annotation"),
        event("aten::mm", 30, 20, "cpu_op"),
    ]
    found = split({"traceEvents": events}, cuda=False)
    expected = {"communication": 10, "tables": 5, "optimizer": 15, "layers": 70, "recomputation": 0, "gaps": 0}
    assert {k: round(v * 1e6, 6) for k, v in found.items()} == {**expected, "step": 100}


def test_a_union_has_the_instants_of_its_spans():
    rng = np.random.default_rng(random.getrandbits(32))
    begins = rng.integers(0, 60, 12)
    spans = np.stack([begins, begins + rng.integers(1, 9, 12)], axis=1).astype(float)
    covered = np.zeros(80, bool)
    for a, b in spans.astype(int):
        covered[a:b] = True
    again = np.zeros(80, bool)
    union = _union(spans)
    for a, b in union.astype(int):
        assert not again[a:b].any()
        again[a:b] = True
    assert (again == covered).all()
    assert (np.diff(union[:, 0]) > 0).all()


def traced(name, ts, dur, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid, "args": args}


def test_kernels_belong_to_operators_and_modules():
    """A trace made by hand: a product in a module, its gradient in autograd's thread, and a copy nobody asked for."""
    sizes = {"Input Dims": [[6], [4, 8], [8, 6]], "Input type": ["float", "float", "float"]}
    events = [
        traced(kernels.MODULE + "layers.3", 0, 50, "user_annotation"),
        traced("aten::addmm", 5, 10, **sizes, **{"Sequence number": 7}),
        traced("cudaLaunchKernel", 6, 1, "cuda_runtime", correlation=1),
        traced(kernels.BACKWARD + "AddmmBackward0", 60, 20, tid=2, **{"Sequence number": 7}),
        traced("aten::mm", 62, 10, tid=2, **{"Input Dims": [[8, 4], [4, 6]], "Input type": ["c10::BFloat16"] * 2}),
        traced("cudaLaunchKernel", 63, 1, "cuda_runtime", tid=2, correlation=2),
        traced("sm90_gemm", 20, 30, "kernel", tid=7, correlation=1),
        traced("sm90_gemm", 70, 10, "kernel", tid=7, correlation=2),
        traced("Memcpy DtoD", 78, 4, "gpu_memcpy", tid=7, correlation=3),
    ]
    found = kernels.tables({"traceEvents": events}, cuda=True)
    kinds = {row["name"]: (round(row["seconds"] * 1e6), row["flops"], row["bytes"]) for row in found["kinds"]}
    assert kinds == {
        "matrix products, forward": (30, 2 * 4 * 8 * 6, 4 * (6 + 32 + 48)),
        "matrix products, backward": (10, 2 * 8 * 4 * 6, 2 * (32 + 24)),
        "copies and casts, forward": (4, 0, 0),
    }
    parts = [row["name"] for row in found["parts"]]
    assert parts == ["layers.*, forward", "layers.*, backward", "(no module), forward"]
    assert round(found["gaps_s"] * 1e6) == 20
    assert round(found["kernels_s"] * 1e6) == 44
    assert "sm90_gemm <- aten::addmm" in kernels.render(found)


def test_a_step_is_its_parts_and_what_is_left():
    part = dict.fromkeys(PARTS, 0.0) | {"layers": 0.2, "optimizer": 0.1, "gaps": 7.0, "step": 8.0}
    found = of_a_step(part, 4, 1.0)
    expected = {"layers": 0.8, "optimizer": 0.1, "gaps": 0.1, "step": 1.0}
    assert found == pytest.approx(dict.fromkeys(PARTS, 0.0) | expected)


def rank(communication, layers, local=0.5):
    parts = dict.fromkeys(PARTS, 0.0) | {"communication": communication, "layers": layers, "optimizer": 0.1}
    return {"parts": parts, "local_s": local, "times": {"data_wait_s": 0.2}}


def test_waiting_for_a_rank_that_computes_longer_is_imbalance():
    found = waterfall([rank(0.5, 1.0), rank(0.1, 1.4)])
    assert found["imbalance"] == pytest.approx((0.4 + 0.0) / 2)
    assert found["exposed communication"] == pytest.approx((0.1 + 0.1) / 2)
    assert found["beside"] == pytest.approx((0.5 + 0.9) / 2)
    assert found["step"] == pytest.approx(sum(v for k, v in found.items() if k != "step"))
    assert found["step"] == pytest.approx(0.5 + 1.0 + 0.1 + 0.2)


def test_the_heaviest_rank_over_the_average():
    assert imbalance([{"flops": 2.0}, {"flops": 4.0}]) == pytest.approx(4 / 3)
    assert imbalance([{"flops": 0.0}]) == 1.0


def test_half_filled_batches_are_uniform_and_valid(cache, tmp_path):
    with assembled(tiny_config(cache), tmp_path / "run") as (_, trainer):
        inputs = trainer.parts.inputs
        batch = half_filled(inputs, 400, {"events": 31}, seed=3)
        lengths = batch.sequences["events"].offsets.diff()
        assert int(lengths.min()) == 1
        assert int(lengths.max()) == batch.sequences["events"].max_len == 31
        assert abs(lengths.double().mean().item() - 16) < 2
        for column, table in inputs.sources[0].ids:
            assert int(batch.sequences["events"].ids[column].max()) < inputs.table(table).rows
        within = batch.sequences["events"].time.split(lengths.tolist())
        assert all(bool((t.diff() > 0).all()) and t[-1] < batch.time[0] for t in within)
        assert torch.isfinite(torch.tensor(trainer.step(batch.slice(0, 8))["loss"]))
        with pytest.raises(ValueError, match="'clicks' is no source of the data; there are events"):
            half_filled(inputs, 4, {"clicks": 3})


def test_units_alone_count_their_own_flops(cache, tmp_path):
    with assembled(tiny_config(cache), tmp_path / "run") as (_, trainer):
        batch = trainer.parts.train.batch(0, 0)
        units = alone.time_units(trainer, batch, repeats=1)
        lengths = {"events": batch.sequences["events"].offsets.diff().tolist()}
        expected = unit_flops(trainer.parts.model_config, trainer.parts.inputs, lengths, batch_size=32)
        assert {u.name: u.flops for u in units} == {n: 3 * f for n, f in expected.items() if f}
        assert all(u.forward_s > 0 for u in units)
        assert all(p.grad is None for p in trainer.model.dense_parameters())
        whole = alone.local_mfu(units, 1e12)
        assert whole == pytest.approx(sum(u.flops for u in units) / sum(u.seconds for u in units) / 1e12)
        assert alone.local_mfu(units, None) is None


def test_recomputation_shows_in_the_trace(cache, tmp_path):
    with assembled(tiny_config(cache, "model.dropout=0"), tmp_path / "run") as (_, trainer):
        recompute(trainer.model.module, ["layers.0"])
        batch = trainer.parts.train.batch(0, 0)
        trainer.step(batch)
        found = split(trace_step(trainer, lambda: trainer.step(batch)), cuda=False)
    assert 0 < found["recomputation"] < found["step"]
    assert found["optimizer"] > 0
    assert sum(found[p] for p in PARTS) == pytest.approx(found["step"])


def least_relative_squares(points):
    """(fixed, per sample) >= 0 of the least sum of ((fixed + per sample x) / y - 1)^2: the best subset of terms."""
    x, y = np.array(points, dtype=np.float64).T
    terms, candidates = np.stack([1 / y, x / y], axis=1), []
    for used in ([0, 1], [0], [1]):
        found = np.zeros(2)
        found[used] = np.linalg.lstsq(terms[:, used], np.ones(len(x)), rcond=None)[0]
        if (found >= 0).all():
            candidates.append((float(np.square(terms @ found - 1).sum()), tuple(found)))
    return min(candidates)[1]


def test_bench_from_the_command_line_and_what_the_planner_reads(cache, tmp_path, capsys):
    file, out = tmp_path / "tiny.toml", tmp_path / "bench"
    file.write_text(to_toml(tiny_config(cache)))
    options = ["--steps", "2", "--warm-up", "1", "--repeats", "1", "--out", str(out)]
    assert main(["bench", "--config", str(file), *options, "--set", "optim.accumulate=2", "--by", "kernel"]) == 0
    said = capsys.readouterr().out
    assert "layers.*.towers.events.sequence.ffn, backward" in said
    assert "E2E MFU – = local MFU – x scaling ratio" in said
    assert "no MFU on a CPU" in said
    found = json.loads((out / "efficiency.json").read_text())
    assert found["mfu"]["end_to_end"] is found["mfu"]["local"] is None
    assert found["units_batch"] == 16
    parts = found["waterfall"]
    assert parts["step"] == pytest.approx(sum(v for k, v in parts.items() if k != "step"))
    assert parts["step"] == pytest.approx(found["ranks"][0]["parts"]["step"] + parts["data wait"])
    profile = Profile.from_toml(out / "profile.toml")
    assert profile.tflops == found["profile"]["tflops"] > 0
    assert profile.unit_us > 0
    layer = next(u for u in found["units"] if u["name"] == "layers.0")
    points = [u for u in found["profile"]["units"] if u["name"] == "layers.0"]
    assert [p["batch"] for p in points] == [1, 16]
    assert points[1]["forward_ms"] == layer["forward_s"] * 1e3
    assert points[1]["backward_ms"] == max(0.0, layer["seconds"] - layer["forward_s"]) * 1e3
    known = {u["name"] for u in found["units"] if u["name"].startswith(("layers.", "heads"))}
    rest = [u for u in found["units"] if u["name"] not in known]
    assert {u.name for u in profile.units} == {"inputs", *known}
    (whole,) = (u for u in found["profile"]["units"] if (u["name"], u["batch"]) == ("inputs", 16))
    assert whole["forward_ms"] == pytest.approx(sum(u["forward_s"] for u in rest) * 1e3)
    fitted = profile.unit("layers.0")
    forward = least_relative_squares([(p["batch"], p["forward_ms"] * 1e-3) for p in points])
    backward = least_relative_squares([(p["batch"], (p["backward_ms"] or 1e-3) * 1e-3) for p in points])
    assert (fitted.forward_fixed_s, fitted.forward_s) == pytest.approx(forward, abs=1e-12)
    assert (fitted.backward_fixed_s, fitted.backward_s) == pytest.approx(backward, abs=1e-12)
    assert main(["plan", "--config", str(file), "--profile", str(out / "profile.toml"), "--gpus", "1"]) == 0
    assert "gem-train bench tiny on cpu" in profile.source
    assert "local MFU 41.0%" in render({**found, "mfu": {**found["mfu"], "local": 0.41}})
    traced = {**found, "step": {**found["step"], "seconds": 0.002}, "waterfall": {**found["waterfall"], "step": 0.003}}
    assert "goes (3.00 ms, 2.00 ms without a trace; " in render(traced)
    assert "goes (2.00 ms; " in render({**traced, "waterfall": {**found["waterfall"], "step": 0.002}})


def test_an_unknown_card_has_no_peak_and_says_so():
    assert peak_flops("NVIDIA H900 Ultra", "bf16").peak is None
    assert "not in the table of peaks" in peak_flops("NVIDIA H900 Ultra", "bf16").note
    assert all(0 < tflops < 1e5 for by_dtype in PEAK_TFLOPS.values() for tflops in by_dtype.values())
