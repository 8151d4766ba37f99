"""What is concluded from runs that do without a part each, and that every part can be left out."""

from __future__ import annotations

import json
import sys
import time
import types

import graph_faults
import pytest
import torch
from gem_kernels import dispatch
from graph_faults import DATA, PARTS, fault, main, suspects, variants


def row(ended="finished", without=(), warnings=()):
    return {"ended": ended, "without": without, "warnings": list(warnings)}


FAILED = "AcceleratorError: CUDA error: unspecified launch failure"


@pytest.mark.parametrize(
    ("what", "is_one"),
    [
        (row(), False),
        (row(""), False),  # stopped
        (row("OSError: no space"), False),
        (row(FAILED), True),
        (row("NonFiniteError: step 208: the gradient's norm is inf (the loss is 1.1)"), True),
        (row("RuntimeError: replay 3 of the forward pass of a room has failed: ..."), True),
        (row(warnings=["two replays differ by up to 2 in the gradients of layers.0"]), True),
    ],
)
def test_what_is_a_fault(what, is_one):
    assert fault(what) is is_one


def test_suspects_are_what_every_fault_had_and_a_clean_run_had_not():
    rows = {"usual": row(FAILED), "portable": row(without=("Hopper softmax", "Hopper GDPA"))}
    assert suspects(rows) == ["Hopper softmax", "Hopper GDPA"]
    rows["gdpa"] = row(FAILED, without=("Hopper GDPA",))
    assert suspects(rows) == ["Hopper softmax"]
    rows["no-graphs"] = row("", without=("graphs",))  # stopped: says nothing
    assert suspects(rows) == ["Hopper softmax"]
    rows["softmax"] = row(FAILED, without=("Hopper softmax",))
    assert suspects(rows) == []


def test_every_part_is_left_out_by_some_variant_and_every_change_takes(tmp_path, monkeypatch):
    found = variants(tmp_path)
    assert {part for variant in found.values() for part in variant.without} == set(PARTS)
    q = torch.zeros(2, 1, 32)
    for name in ("portable", "reference", "portable-gdpa"):
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "_BACKENDS", {b: lambda problem: (True, "") for b in dispatch._BACKENDS})
            found[name].change()
            for operator in ("jagged_attention", "gdpa"):
                problem = dispatch.Problem(op=operator, device=q.device, dtype=q.dtype, head_dim=32)
                able = [b for b, applies in dispatch._BACKENDS.items() if applies(problem)[0]]
                want = {"portable": ["triton", "reference"], "reference": ["reference"]}.get(name)
                full = ["hopper", "triton", "reference"]
                assert able == (want or (full[1:] if operator == "gdpa" else full))
    launch, backward, lanes = (
        types.SimpleNamespace(FORWARD={"3x128": 1}),
        types.SimpleNamespace(BACKWARD={"stream": 2}),
        types.SimpleNamespace(Lanes=type("Lanes", (), {})),
    )
    for module, standing in {"hopper.launch": launch, "hopper.launch_backward": backward}.items():
        monkeypatch.setitem(sys.modules, f"gem_kernels.{module}", standing)
    monkeypatch.setitem(sys.modules, "gem_model.lanes", lanes)
    for name in ("forward-128", "whole-backward", "one-stream"):
        found[name].change()
    assert (launch.choose_forward(1, bias=True), backward.choose_backward(4, 4), lanes.Lanes().open([], q)) == (
        1,
        2,
        {},
    )


def test_what_is_changed_is_there():
    from gem_kernels.hopper import launch, launch_backward
    from gem_model.lanes import Lanes

    assert "3x128" in launch.FORWARD
    assert "stream" in launch_backward.BACKWARD
    assert callable(launch.choose_forward)
    assert callable(launch_backward.choose_backward)
    assert callable(Lanes.open)
    assert all("=" in setting for setting in DATA)


def test_runs_are_told_and_those_that_take_too_long_are_stopped(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, pathlib, sys, time\n"
        "out, name = pathlib.Path(sys.argv[2]), sys.argv[4]\n"
        "time.sleep(60 if name == 'portable' else 0)\n"
        "if name == 'checked': sys.exit(3)\n"
        f"told = {{'usual': {FAILED!r}}}.get(name, 'finished')\n"
        "(out / f'{name}.json').write_text(json.dumps({'ended': told, 'where': '', 'warnings': []}))\n"
    )
    monkeypatch.setattr(graph_faults, "__file__", str(script))
    quick, began = ("usual", "one-stream"), time.monotonic

    def clock():  # the time is up when those have told
        return began() + 1e6 * all((tmp_path / f"{name}.json").exists() for name in quick)

    monkeypatch.setattr(graph_faults, "time", types.SimpleNamespace(monotonic=clock, sleep=time.sleep))
    assert main(["--out", str(tmp_path), "--variants", "portable,usual,one-stream", "--jobs", "3"]) == 0
    rows = json.loads((tmp_path / "faults.json").read_text())
    assert [rows[name]["ended"] for name in ("usual", "portable", "one-stream")] == [FAILED, "", "finished"]
    told = capsys.readouterr().out
    assert "FAULT usual" in told
    assert "left to suspect: branches" in told
    (tmp_path / "usual.json").unlink()
    main(["--out", str(tmp_path), "--variants", "checked"])
    assert "status 3" in json.loads((tmp_path / "faults.json").read_text())["checked"]["ended"]
    with pytest.raises(ValueError, match="unknown variants"):
        main(["--out", str(tmp_path), "--variants", "usuall"])
