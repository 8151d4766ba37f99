"""What counts as the same kernel, and what the command says."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from gem_kernels import ptx_check

PTX = """
.visible .entry softmax_kernel(
\t.param .u64 softmax_kernel_param_0
)
{
\tld.param.b64 \t%rd1, [softmax_kernel_param_0];
\tadd.s32 \t%r1, %r2, 4;
\tret;
}
"""


def test_names_lines_and_comments_are_no_part_of_a_digest():
    again = PTX.replace("softmax_kernel", "forward_kernel").replace("\tret;", "\t.loc 1 20 3\n\tret; // begin\n\n")
    debug = '\n\t.file\t1 "/elsewhere/softmax.py"\n\t.section\t.debug_abbrev\n\t{\n.b8 1\n\t}\n'
    assert ptx_check.digest(again + debug) == ptx_check.digest(PTX)
    assert ptx_check.digest(PTX.replace("%r2, 4", "%r2, 8")) != ptx_check.digest(PTX)
    with pytest.raises(ValueError, match="must have an entry"):
        ptx_check.digest("nothing")


def test_the_command_names_what_changed(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    code = {"a": PTX, "b": PTX}
    monkeypatch.setattr(ptx_check, "_cases", lambda modules: [SimpleNamespace(name=n, arch=(90,)) for n in code])
    monkeypatch.setattr(ptx_check, "ptx_of", lambda case, arch: code[case.name])
    before, after = str(tmp_path / "before.json"), str(tmp_path / "after.json")
    assert ptx_check.main([before]) == 0
    assert ptx_check.main([after, "--against", before]) == 0
    code |= {"b": PTX.replace("add.s32", "sub.s32"), "c": PTX}
    capsys.readouterr()
    assert ptx_check.main([after, "--against", before]) == 1
    said = capsys.readouterr().out
    assert "1 of 3 changed\n  b\n" in said
    assert [line.split()[-1] for line in said.splitlines()[:3]] == ["same", "CHANGED", "new"]
    assert json.loads((tmp_path / "after.json").read_text()).keys() == {"a", "b", "c"}
    assert ptx_check.main([after, "--against", before, "--match", "^[ac]$"]) == 0
