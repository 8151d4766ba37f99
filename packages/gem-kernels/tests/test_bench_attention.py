"""The attention and gdpa suites, but for the clock: every case runs to its end, whatever fails on the way."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from gem_kernels import schedule
from gem_kernels.bench import __main__ as bench
from gem_kernels.bench import carry, cases, gate, peers, prebuild, skew, suite, timing
from gem_kernels.tiling import Tile

LENGTHS = (np.array([5, 0, 20]), np.array([7, 3, 18]))
CEILINGS = {"gemm_bf16_tflops": 700.0, "copy_tbps": 4.0}
OPTIONS = {"passes": ("forward", "backward"), "peer_names": (), "rounds": 1, "rep": 1, "ceilings": CEILINGS}


def small(**options):
    return cases.Case(options.pop("name", "small"), *LENGTHS, **{"dim": 16, **options})


@pytest.fixture
def no_clock(monkeypatch):
    """Every run runs and takes a millisecond."""
    monkeypatch.setattr(timing, "median_ms", lambda run, rep: run() is None or 1.0)
    monkeypatch.setattr(timing, "captured", lambda run: run)
    monkeypatch.setattr(timing, "host_us", lambda run, calls=1: run() is None or 3.0)
    monkeypatch.setattr(timing, "gemm", lambda device: lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    if not torch.cuda.is_available():  # the interpreter takes its time
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(suite, "HEADS", 1)
        for name in ("jagged_attention.triton", "gdpa.triton"):
            monkeypatch.setattr(import_module(f"gem_kernels.{name}"), "tile", lambda *_: Tile(bm=32, bn=32))


def rows_of(case, act, device, **options):
    return suite.measure(case, act, device, only="", skip=("hopper", "baseline"), gate_only=False, **OPTIONS, **options)


@pytest.mark.parametrize("options", [{}, {"window": (-1, 0)}, {"window": (3, 0)}, {"bias": True}], ids=str)
@pytest.mark.parametrize("act", [None, "silu"])
def test_every_kind_of_case_has_rows(device, no_clock, act, options):
    rows = rows_of(small(**options), act, device)
    if act is not None and options.get("bias"):
        assert rows == []
        return
    assert {(r["variant"], r["pass"]) for r in rows} >= {("triton", "forward"), ("triton", "backward")}
    assert all(r["of_gemm"] == round(r["tflops"] / (timing.GEMM_FLOPS / 1e9), 3) for r in rows)
    subtracts = any(r["variant"] == "triton subtraction" for r in rows)
    assert subtracts == (act is None and "window" not in options)


def test_clocks_are_recorded_and_inputs_may_be_constant(device, no_clock, monkeypatch):
    monkeypatch.setattr(timing, "sm_ghz", lambda run, ms: 1.25004)
    options = {**OPTIONS, "passes": ("forward",)}
    made = suite.Problem.make

    def make(case, act, device, *, constant=False):
        p = made(case, act, device, constant=constant)
        assert len({*p.q.unique().tolist(), *p.v.unique().tolist()}) == 1
        return p

    monkeypatch.setattr(suite.Problem, "make", make)
    options |= {"only": "triton", "skip": ("subtraction",), "gate_only": False}
    rows = suite.measure(small(), None, device, **options, clock=True, constant=True)
    assert [(r["variant"], r["ghz"], r["peers_ghz"]) for r in rows] == [("triton", 1.25, {"gemm": 1.25})]
    assert "at 1.25 GHz" in bench._table(rows)


def test_self_attention_has_one_tensor_of_offsets(device):
    q, k = LENGTHS
    for other, one in ((k, False), (q.copy(), True)):
        p = suite.Problem.make(cases.Case("some", q, other, dim=16), None, device)
        assert (p.q_offsets is p.k_offsets) is one


def test_polynomials_are_gated_against_the_exact_activation(device, no_clock):
    case = small(name="self-full-1024")
    p = suite.Problem.make(case, "silu_poly", device)
    assert p.scale * p.q.float().norm(dim=-1).max() * p.k.float().norm(dim=-1).max() <= 1.0001 * suite.BOUND
    rows = rows_of(case, "silu_poly", device)
    assert {r["op"] for r in rows} == {"gdpa:silu_poly"}
    assert all(r["error"] < gate.TOLERANCE for r in rows)
    assert rows_of(small(name="pma"), "silu_poly", device) == []


def test_what_fails_is_said_and_stepped_over(device, no_clock, monkeypatch, capsys):
    plain = suite.ours

    def ours(p):
        def broken():
            raise ValueError("a shape that it refuses")

        bad = suite.Variant(lambda: torch.zeros_like(p.q) + 3.0, None)
        return {"bad": bad, "broken": suite.Variant(broken, broken), "triton": plain(p)["triton"]}

    def late(c, q_offsets, k_offsets):
        calls = []

        def run(q, k, v):
            calls.append(q)
            if len(calls) > 2:
                raise RuntimeError("out of something")
            return q

        return run

    def refuses(c, q_offsets, k_offsets):
        raise AssertionError("built for other heads")

    monkeypatch.setattr(suite, "ours", ours)
    monkeypatch.setattr(peers, "PEERS", {"late": late, "refuses": refuses})
    rows = rows_of(small(), None, device)
    assert {r["variant"] for r in rows} == {"triton"}
    said = capsys.readouterr().out
    for words in (
        "bad forward: NOT TIMED: RuntimeError: wrong",
        "broken backward: NOT TIMED: ValueError: a shape that it refuses",
        "peer late NOT TIMED: RuntimeError: out of something",
        "no refuses: AssertionError: built for other heads",
    ):
        assert words in said


def test_a_case_that_cannot_be_measured_does_not_end_the_run(monkeypatch, tmp_path, capsys):
    def measure(options, name, device, found):
        if name == "pma":
            raise RuntimeError("no memory left")
        return [{"case": name, "unit": "tflops"}]

    monkeypatch.setattr(bench, "_measure", measure)
    monkeypatch.setattr(bench, "_table", lambda rows, heading: f"{heading} {rows[0]['case']}")
    monkeypatch.setattr(prebuild, "build", lambda todo, workers: None)
    for name, value in (("is_available", True), ("current_device", 0), ("empty_cache", None),
                        ("get_device_name", "a card"), ("synchronize", None)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(timing, "ceilings", lambda device: CEILINGS)
    words = ["attention", "--case", "self-half-512", "--case", "pma", "--case", "short-kv-32", "--out"]
    assert bench.main([*words, str(tmp_path / "a.json")]) == 0
    assert [r["case"] for r in json.loads((tmp_path / "a.json").read_text())["rows"]] == [
        "self-half-512",
        "short-kv-32",
    ]
    said = capsys.readouterr().out
    at = [said.index(x) for x in ("True self-half-512", "pma: RuntimeError: no memory left", "False short-kv-32")]
    assert at == sorted(at)

    # A GPU that stops answering: what is left goes to a new process, with what was measured.
    called = []
    monkeypatch.setattr(carry, "alive", lambda: False)
    monkeypatch.setattr(carry.subprocess, "call", lambda command: called.append(command) or 0)
    assert bench.main([*words, str(tmp_path / "b.json")]) == 0
    (command,) = called
    assert command[-4:] == ["--case", "pma", "--case", "short-kv-32"]
    assert "self-half-512" not in command
    monkeypatch.undo()
    begun, ceilings, rows = carry.load(Path(command[command.index("--carry") + 1]))
    assert (begun[:3], ceilings) == (words[:3], CEILINGS)
    assert [r["case"] for r in rows] == ["self-half-512"]


def test_kernels_are_built_once_for_all_lengths():
    todo = prebuild.tasks(cases.NAMES, [None], lambda variant: "baseline" not in variant)
    assert len(set(todo)) == len(todo) < 65
    assert [variant for _, _, variant in todo].index("peer fa4") == 0
    assert sum(variant == "peer fa4" for _, _, variant in todo) == 5  # three widths, causal, a window
    assert ("self-full-1024", None, "hopper 3x128") in todo
    assert not any(name == "self-half-4096" for name, _, _ in todo)
    assert ("short-kv-32", None, "hopper short-keys") in todo
    assert {name for name, _, _ in todo} >= {"half-1024-d96", "half-1024-causal", "half-4096-window", "half-1024-bias"}
    assert all(
        act != "silu" or name != "half-1024-bias" for name, act, _ in prebuild.tasks(cases.NAMES, ["silu"], bool)
    )


def test_padded_peers_say_what_they_do_not_do():
    q = torch.randn(25, 4, 16)
    k = v = torch.randn(28, 4, 16)
    where = torch.tensor([0, 5, 5, 25]), torch.tensor([0, 7, 10, 28])
    for name, options, reason in (
        ("cudnn-padded", {"window": (3, 0)}, "no window"), ("sdpa-padded", {}, "for a bias only"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=reason):
            peers.padded(name, small(**options), q, k, v, *where, None)
    few = cases.Case("few", np.array([100] + [1] * 99), np.array([100] + [1] * 99))
    with pytest.raises(NotImplementedError, match="padded tokens"):
        peers.padded("cudnn-padded", few, q, k, v, *where, None)
    bias = torch.randn(1, 4, 20, 18)
    run, dense = peers.padded("sdpa-padded", small(bias=True), q, k, v, *where, bias)
    assert run(*dense).shape == (3, 4, 20, 16)


def test_the_skew_of_a_dense_grid_and_of_its_tiles():
    q, k = torch.tensor([200, 0, 64]), torch.tensor([128, 300, 1])
    shape = schedule.TileShape(consumers=3, step=128)
    grid = skew.dense_grid(q, k, 2, shape)
    # two row tiles a (sequence, head): 192 + 8 rows of the first sequence, none of the second, 64 of the third
    assert grid.tolist() == [1 * 6 + 2, 1 * 3 + 2] * 2 + [0] * 4 + [1 * 3 + 2, 0] * 2
    found = skew.skews("self-lognormal")
    assert found["empty"] > 0.9
    assert found["dense grid"] > found["sorted, in runs"] > found["zigzag"] > found["taken"] >= 1.0
