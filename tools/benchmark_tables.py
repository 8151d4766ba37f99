"""Write the tables of docs/benchmarks from the JSON files: `python tools/benchmark_tables.py [--check]`.

README.md has the files beside it, earlier/README.md those of kernels and layers as they were. Everything after a page's
marker line is generated; `--check` changes nothing and exits with 1 when a page is out of date.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
MARKER = "<!-- tables: tools/benchmark_tables.py -->"


# Suites of plain rows: (heading, path of keys in a row, digits after the point; None: text, -1: a power of ten)
PLAIN: dict[str, list[tuple[str, str, int | None]]] = {
    "memory": [
        ("variant", "variant", None), ("step ms", "ms", 1), ("host ms", "host_ms", 1), ("kept MiB", "kept_mib", 0),
        ("peak MiB", "peak_mib", 0), ("planned peak MiB", "plan_peak_mib", 0), ("again ms", "plan_recomputed_ms", 1),
        ("gradients differ by", "error", -1),
    ],
    "comm": [
        ("what is gathered", "case", None), ("collective", "op", None), ("ms", "ms", 3), ("GB/s", "gbps", 0),
        ("rate of a product beside it", "gemm", 3),
    ],
    "scaling": [
        ("row", "case", None), ("samples a card and part", "batch", 0), ("parts", "parts", 0), ("step ms", "ms", 1),
        ("samples/s", "samples_per_s", 0),
        ("ratio", "ratio", 3), ("exposed ms", "exposed_ms", 1), ("work, max/mean", "work", 3), ("GiB", "memory_gib", 1),
        ("tables MiB", "tables_mib", 0), ("plan ms", "plan.ms", 1), ("plan GiB", "plan.memory_gib", 1),
    ],
    "excess": [
        ("model", "case", None), ("precision", "precision", None), ("parameters", "parameters", 0),
        ("steps", "steps", 0), ("step ms", "step_ms", 1), ("click NE", "tasks.click.ne", 5),
        ("above the best, %", "tasks.click.excess_pct", 3), ("convert NE", "tasks.convert.ne", 5),
        ("above the best, %", "tasks.convert.excess_pct", 3),
    ],
    "instruments": [
        ("a step ... the instruments", "case", None), ("clock ms", "clock_ms", 2), ("processor ms", "processor_ms", 2),
        ("inside ms", "inside_ms", 3),
    ],
    "quality": [
        ("size", "case", None), ("dense parameters", "parameters.dense", 0), ("training FLOPs", "flops", -1),
        ("steps", "steps", 0), ("s", "seconds", 1), ("NE", "ne", 5), ("best possible", "optimal_ne", 5),
    ],
}  # fmt: skip

TOLD = (
    "model", "workload", "batch", "accumulate", "graphs", "world", "recipe", "samples", "optimal", "line",
    "inside_share", "clock_share",
)  # fmt: skip


def plain(name: str, result: dict[str, Any]) -> str:
    """What gem_parallel.bench or a tool here wrote: its rows as they are."""
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    columns = PLAIN[result["suite"]]
    more = {k: result[k] for k in TOLD if k in result}
    lines = [
        f"## {result['suite']}, {result['card']}, {result['date']}, {name.removesuffix('.json')}",
        "",
        f"[{name}]({name}): commit {result['commit'][:10]}; {versions}. "
        f"{', '.join(f'{k} {v}' for k, v in more.items())}.",
        f"`{result['command']}`",
        "",
        "| " + " | ".join(head for head, _, _ in columns) + " |",
        "| " + " | ".join("---" for _ in columns) + " |",
    ]
    for row in result["rows"]:
        cells = []
        for _, path, digits in columns:
            value: Any = row
            for key in path.split("."):
                value = (value or {}).get(key)
            known = value is not None and value == value  # not NaN
            if digits == -1:
                cells.append(f"{value:.1e}" if known else "")
            else:
                cells.append(str(value) if digits is None else number(value if known else None, digits))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(value: float | None, digits: int = 0) -> str:
    """A figure for a cell; nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f}"


def table(name: str, result: dict[str, Any]) -> str:
    """One result file as a heading, its circumstances and a table."""
    if result["suite"] in ("ladder", "efficiency"):
        return {"ladder": ladder, "efficiency": efficiency}[result["suite"]](name, result)
    if result["suite"] in PLAIN:
        return plain(name, result)
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    ceilings = ", ".join(f"{k} {v:g}" for k, v in result["ceilings"].items())
    peers = sorted({peer for row in result["rows"] for peer in row.get("peers", {})})
    units = ", ".join(sorted({row.get("unit", "tflops") for row in result["rows"]}))
    head = ["case", "op", "pass", "variant", "ms", "TFLOP/s", "GB/s", "of GEMM", "of copy", "CPU us", "error", *peers]
    lines = [
        f"## {result['suite']}, {result['card']}, {result['date']}",
        "",
        f"[{name}]({name}): commit {result['commit'][:10]}; {versions}. Ceilings of the same run: {ceilings}.",
        f"Peers are of the same run, in {units}; TFLOP/s count useful work only.",
        "",
        "| " + " | ".join(head) + " |",
        "| " + " | ".join("---" for _ in head) + " |",
    ]
    for row in result["rows"]:
        cells = [
            f"{row['case']} (d{row['head_dim']})", row["op"], row["pass"], row["variant"], number(row["ms"], 3),
            number(row.get("tflops")), number(row.get("gbps")), number(row.get("of_gemm"), 2),
            number(row.get("of_copy"), 2), number(row.get("host_us")),
            f"{row['error']:.1e}" if row.get("error") is not None else "",
            *(number(row.get("peers", {}).get(peer)) for peer in peers),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ladder(name: str, result: dict[str, Any]) -> str:
    """What `gem-train ladder` wrote: a line for each rung, with the gain over the first, or why it was not measured."""
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    lengths = result["lengths"]
    if isinstance(lengths, dict):
        lengths = ", ".join(f"{source} {how}" for source, how in lengths.items())
    commit = (result["commit"] or "unknown")[:10]
    again = ", layers recomputed" if result["recompute"] else ""
    head = ["rung", "samples/s", "gain", "step ms", "TFLOP/s", "MFU", "local MFU", "GiB", "NE", "same function"]
    lines = [
        f"## ladder, {result['recipe']}, {result['devices'] or 1} x {result['card']}, {result['date']}",
        "",
        f"[{name}]({name}): commit {commit}; {versions}. {result['batch_size']} samples a step in "
        f"{result['accumulate']} part(s), histories {lengths}{again}. {result['peak']}.",
        f"`{result['command']}`",
        "",
        "| " + " | ".join(head) + " |",
        "| " + " | ".join("---" for _ in head) + " |",
    ]
    measured = [row for row in result["rows"] if not row["reason"]]
    for row in result["rows"]:
        if row["reason"]:
            cells = [row["rung"], f"not measured: {row['reason']}", *[""] * (len(head) - 2)]
        else:
            gain = row["samples_per_s"] / measured[0]["samples_per_s"]
            shares = ["" if row[key] is None else f"{row[key]:.1%}" for key in ("mfu", "local_mfu")]
            cells = [
                row["rung"], number(row["samples_per_s"]), f"{gain:.2f}x", number(row["step_ms"], 1),
                number(row["tflops"], 1), *shares, number(row["memory_gib"], 1), number(row["ne"], 4),
                "yes" if row["same_function"] else "no",
            ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def efficiency(name: str, result: dict[str, Any]) -> str:
    """What `gem-train bench` wrote: MFU with its numerators, the layers alone, and where a step goes."""
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    step, mfu, parts = result["step"], result["mfu"], result["waterfall"]
    whole, local = ("none" if mfu[key] is None else f"{mfu[key]:.1%}" for key in ("end_to_end", "local"))
    lines = [
        f"## efficiency, {result['recipe']}, {result['world']} x {result['card']}, {result['date']}",
        "",
        f"[{name}]({name}): commit {(result['commit'] or 'unknown')[:10]}; {versions}. {result['precision']}, "
        f"{result['batch_size']} samples a step in {result['accumulate']} part(s), lengths {result['lengths']}.",
        f"`{result['command']}`",
        "",
        f"Step {step['seconds'] * 1e3:.1f} ms, {step['samples_per_s']:.0f} samples/s, "
        f"{step['memory_bytes'] / 2**30:.1f} GiB.",
        f"E2E MFU {whole} = local MFU {local} x scaling ratio {mfu['scaling_ratio']:.3f}: {mfu['stated']}.",
        "",
        f"| unit alone, {result['units_batch']} samples | forward ms | both ms | TFLOP/s | MFU |",
        "| --- | --- | --- | --- | --- |",
    ]
    for unit in result["units"]:
        share = "" if unit["mfu"] is None else f"{unit['mfu']:.1%}"
        times = (number(unit[key] * 1e3, 2) for key in ("forward_s", "seconds"))
        lines.append("| " + " | ".join([unit["name"], *times, number(unit["tflops"], 1), share]) + " |")
    lines += ["", "| part of a step | ms | share |", "| --- | --- | --- |"]
    lines += [
        f"| {part} | {number(seconds * 1e3, 1)} | {seconds / parts['step']:.1%} |" for part, seconds in parts.items()
    ]
    if result.get("kernels"):
        lines += ["", "| kernels of one part, by kind | ms | share | count |", "| --- | --- | --- | --- |"]
        total = result["kernels"]["kernels_s"]
        lines += [
            f"| {row['name']} | {number(row['seconds'] * 1e3, 2)} | {row['seconds'] / total:.1%} | {row['count']} |"
            for row in result["kernels"]["kinds"]
        ]
    return "\n".join(lines)


def glance(results: list[dict[str, Any]]) -> str:
    """The public operators beside their best peer of the same run, forward and backward: a line for each case."""
    lines = [
        "## At a glance",
        "",
        "Useful TFLOP/s of the public operator (`hopper`), in brackets the best peer's of the same run.",
        "",
        "| op | case | forward | backward | commit |",
        "| --- | --- | --- | --- | --- |",
    ]
    told: dict[tuple[str, str, str], dict[str, str]] = {}
    for result in results:
        for row in result["rows"]:
            # A plain product of 8192 is a ceiling, and what pads does more than is counted: all are peers but it
            peers = {peer: rate for peer, rate in row["peers"].items() if not peer.startswith("gemm")}
            if row["variant"] != "hopper" or row.get("tflops") is None or not peers:
                continue
            best = max(peers, key=lambda peer: peers[peer])
            key = (row["op"], f"{row['case']} (d{row['head_dim']})", result["commit"][:10])
            told.setdefault(key, {})[row["pass"]] = f"{row['tflops']:.0f} ({best} {peers[best]:.0f})"
    lines += [
        f"| {op} | {case} | {rates.get('forward', '')} | {rates.get('backward', '')} | {commit} |"
        for (op, case, commit), rates in told.items()
    ]
    return "\n".join(lines)


def contents(files: list[Path], results: list[dict[str, Any]]) -> str:
    """The files of a page by suite."""
    suites: dict[str, list[str]] = {}
    for path, result in zip(files, results, strict=True):
        suites.setdefault(result["suite"], []).append(f"[{path.stem}]({path.name})")
    return "\n".join(["| suite | files |", "| --- | --- |", *(f"| {s} | {', '.join(f)} |" for s, f in suites.items())])


def page(folder: Path, current: str) -> str:
    """The page with its tables made anew; the part above the marker stays."""
    head = current.split(MARKER)[0].rstrip()
    files = sorted(folder.glob("*.json"))
    results = [json.loads(path.read_text()) for path in files]
    parts = [contents(files, results)]
    if folder == FOLDER:
        parts.append(glance([result for result in results if result["suite"] in ("attention", "gdpa")]))
    parts += [table(path.name, result) for path, result in zip(files, results, strict=True)]
    return "\n\n".join([head, MARKER, *parts]) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    args = parser.parse_args()
    for folder in (FOLDER, FOLDER / "earlier"):
        readme = folder / "README.md"
        current = readme.read_text()
        fresh = page(folder, current)
        if args.check and fresh != current:
            raise SystemExit(f"{readme} is out of date; run python tools/benchmark_tables.py")
        if not args.check:
            readme.write_text(fresh)


if __name__ == "__main__":
    main()
