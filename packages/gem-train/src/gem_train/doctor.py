"""What is installed, whether it fits together, and what would run where: `gem-train doctor`."""

from __future__ import annotations

import importlib
import json
import platform
import resource
import shutil
from pathlib import Path
from typing import Any

from gem_train import recipes
from gem_train.config.places import cache_folder
from gem_train.run_dir import LIBRARIES, PACKAGES, version

# torch pins triton; fbgemm 1.X is built for torch 2.(X + 5).
TRITON_OF_TORCH = {(2, 11): (3, 6), (2, 13): (3, 7), (2, 14): (3, 8)}
FBGEMM_BEHIND_TORCH = 5
LEAST_FREE = {"here": 2 << 30, "cache": 1 << 30, "shared_memory": 64 << 20}  # bytes
PLACES = {"here": "this folder", "cache": "for the data's cache", "shared_memory": "shared memory"}
LEAST_FILES = 256


def examine() -> dict[str, Any]:
    """Versions, verdicts, devices and kernels; `healthy` is False if a verdict is bad."""
    imports = _imports()  # first: a package that lies on the path without being installed has its version inside
    versions = {name: version(name) for name in (*PACKAGES, *LIBRARIES)}
    verdicts = [*imports, *match(versions)]
    findings: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "verdicts": verdicts,
        "recipes": recipes.names(),
    }
    importable = all(v["good"] for v in verdicts if v["what"] in ("torch", "gem_kernels"))
    findings["limits"] = limits()
    verdicts += judge(findings["limits"])
    findings["devices"] = _devices() if importable else []
    findings["links"] = _links() if importable else []
    findings["kernels"] = _kernels() if importable else []
    findings["healthy"] = all(v["good"] for v in verdicts)
    return findings


def match(versions: dict[str, str | None]) -> list[dict[str, Any]]:
    """Whether torch, triton and fbgemm were made for each other: {"what", "good", "says"} each.

    A pair that the table does not know is no fault; it says that nobody tried it.
    """
    torch, triton = _numbers(versions["torch"]), _numbers(versions["triton"])
    fbgemm_version = versions["fbgemm-gpu-cpu"] or versions["fbgemm-gpu"]
    fbgemm = _numbers(fbgemm_version)
    if torch is None:
        return [_verdict("torch/triton/fbgemm", False, "torch is not installed")]
    verdicts = []
    if triton is None:
        verdicts.append(_verdict("torch/triton", False, "triton is not installed: the reference kernels alone can run"))
    else:
        wanted = TRITON_OF_TORCH.get(torch)
        names = f"torch {versions['torch']} with triton {versions['triton']}"
        if wanted is None:
            verdicts.append(_verdict("torch/triton", True, f"{names}: this pair was never tried"))
        else:
            says = f"{names}: " + ("they match" if triton == wanted else f"expected triton {_dotted(wanted)}")
            verdicts.append(_verdict("torch/triton", triton == wanted, says))
    if fbgemm is None:
        verdicts.append(
            _verdict("torch/fbgemm", False, "fbgemm is not installed: there are no embedding tables without it")
        )
    else:
        expected = (1, torch[1] - FBGEMM_BEHIND_TORCH)
        good = torch[0] == 2 and fbgemm == expected
        says = f"torch {versions['torch']} with fbgemm {fbgemm_version}: "
        verdicts.append(
            _verdict("torch/fbgemm", good, says + ("they match" if good else f"expected fbgemm {_dotted(expected)}"))
        )
    return verdicts


def limits() -> dict[str, Any]:
    """What the system gives a process: bytes of disk and shared memory that are free, and open files."""
    places = {"here": Path.cwd(), "cache": _existing(cache_folder()), "shared_memory": Path("/dev/shm")}
    free = {name: shutil.disk_usage(p).free for name, p in places.items() if p.exists()}
    return {
        "free_bytes": free,
        "places": {name: str(path) for name, path in places.items()},
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "file_size": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
        "unlimited": resource.RLIM_INFINITY,
    }


def judge(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Whether that is enough for a run: checkpoints on the disk, batches in shared memory, a file for each column."""
    verdicts = []
    for name, least in LEAST_FREE.items():
        if name in found["free_bytes"]:
            free, where = found["free_bytes"][name], found["places"][name]
            says = f"{free / 2**30:.1f} GiB free in {where} ({PLACES[name]})" + (
                "" if free >= least else f", expected {least / 2**30:.2f} GiB or more"
            )
            verdicts.append(_verdict(f"disk ({name})", free >= least, says))
    files = found["open_files"]
    enough = files == found["unlimited"] or files >= LEAST_FILES
    says = f"{files} open files at once" + ("" if enough else f", expected {LEAST_FILES} or more (ulimit -n)")
    verdicts.append(_verdict("open files", enough, says))
    if found["file_size"] != found["unlimited"]:
        verdicts.append(
            _verdict("file size", False, f"no file may be larger than {found['file_size']:,} bytes (ulimit -f)")
        )
    return verdicts


def _existing(path: Path) -> Path:
    """The nearest folder of `path` that is there."""
    return next(p for p in (path, *path.parents) if p.exists())


def render(findings: dict[str, Any], *, as_json: bool = False) -> str:
    """The findings for a person, or as JSON."""
    if as_json:
        return json.dumps(findings, indent=2)
    lines = [f"Python {findings['python']} on {findings['platform']}", "", "Versions"]
    lines += [f"  {name:<16} {v or 'not installed'}" for name, v in findings["versions"].items()]
    lines += ["", "Verdicts"]
    lines += [f"  {'ok ' if v['good'] else 'BAD'} {v['says']}" for v in findings["verdicts"]]
    lines += ["", "Devices"] + [f"  {device}" for device in findings["devices"] or ["unknown: torch can't be imported"]]
    lines += ["", "Links (as gem-train plan takes them)"] + [f"  {line}" for line in findings["links"]]
    lines += ["", "Kernels (which backend runs, and what was considered)", *_kernel_lines(findings["kernels"])]
    lines += ["", f"Recipes: {', '.join(findings['recipes']) or 'none; reinstall gem-train'}"]
    lines += ["", "All is well." if findings["healthy"] else "Something does not fit; see the lines marked BAD."]
    return "\n".join(lines)


def _kernel_lines(kernels: list[dict[str, Any]]) -> list[str]:
    """Operators that are answered alike together, with the reasons once."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for k in kernels:
        reasons = (f"    {name}: {reason}" for name, reason in k["reasons"].items())
        alike.setdefault((f"  on {k['device']}: {k['backend']}", *reasons), []).append(k["operator"])
    return [
        line
        for (choice, *reasons), operators in alike.items()
        for line in (f"{choice} for {', '.join(operators)}", *reasons)
    ]


def _imports() -> list[dict[str, Any]]:
    """A mismatched build shows when it is imported, with undefined symbols."""
    verdicts = []
    for name in ("torch", "triton", "torchrec", "gem_kernels", "gem_lowprec", "gem_data", "gem_parallel", "gem_model"):
        try:
            importlib.import_module(name)
            verdicts.append(_verdict(name, True, f"{name} can be imported"))
        except Exception as error:  # an extension with a foreign ABI may raise anything
            verdicts.append(_verdict(name, False, f"{name} can't be imported: {why_import_failed(error)}"))
    return verdicts


def why_import_failed(error: BaseException) -> str:
    """What `error` says, what lay under it, and what to do where NVIDIA's driver is what is missing."""
    says = []
    deeper: BaseException | None = error
    while deeper is not None:
        line = str(deeper).strip().splitlines()[0] if str(deeper).strip() else type(deeper).__name__
        says += [line] if line not in says else []
        deeper = deeper.__cause__ or deeper.__context__
    if any(library in line for line in says for library in ("libcuda.so", "libnvidia-ml.so")):
        says.append("this is a build for GPUs on a machine without NVIDIA's driver; for CPUs there is fbgemm-gpu-cpu")
    return "; ".join(says)


def _devices() -> list[str]:
    import torch

    threads = torch.get_num_threads()
    names = [f"cpu: torch computes with {threads} thread{'s' if threads != 1 else ''}"]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        names.append(f"cuda:{i}: {p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}")
    return names


def _links() -> list[str]:
    """The tiers of links that the planner would assume, and where each number comes from."""
    from gem_parallel import Topology

    found = Topology.detect()
    tiers = [
        f"{t.name}: joins {t.size} device{'s' if t.size != 1 else ''}, {t.bandwidth_gbps:g} GB/s one way, "
        f"{t.latency_us:g} us"
        for t in found.tiers
    ]
    return tiers + [f"  {note}" for note in found.notes]


def _kernels() -> list[dict[str, Any]]:
    """dispatch.why for each operator on each kind of device there is."""
    import warnings

    import torch
    from gem_kernels import dispatch

    rows = []
    kinds = [("cpu", torch.float32)] + ([("cuda", torch.bfloat16)] if torch.cuda.is_available() else [])
    for operator in dispatch.OPERATORS:
        for kind, dtype in kinds:
            q = torch.empty(1, 1, 64, device=kind, dtype=dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a fallback is in the reasons
                choice = dispatch.why(operator, q)
            rows.append(
                {"operator": operator, "device": kind, "backend": choice.backend, "reasons": dict(choice.reasons)}
            )
    return rows


def _verdict(what: str, good: bool, says: str) -> dict[str, Any]:
    return {"what": what, "good": good, "says": says}


def _numbers(text: str | None) -> tuple[int, int] | None:
    """The first two numbers of a version."""
    if text is None:
        return None
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
