"""One self-contained page about a run: report.html."""

from __future__ import annotations

import datetime
import html
from pathlib import Path
from typing import Any

from gem_train.config import to_toml
from gem_train.report import figures as draw
from gem_train.report.page import Figures, grid, page, pairs, section, table
from gem_train.report.run import Run
from gem_train.run_dir import RunDir
from gem_train.table import COLUMNS, NAMES, above_the_best, cell, interval, rows

SHOWN = 20  # events of trouble


def write_report(run: RunDir, *, png: bool = False) -> Path:
    """Make report.html of what the folder holds so far; a run that was not tested yet has no table of figures.

    With `png`, also figures/*.png. Raises UserError where the folder is no run.
    """
    of, figures = Run.read(run), Figures(run.path / "figures" if png else None)
    body = [
        f"<h1>{html.escape(of.name)}</h1>",
        f'<p class="sub">{html.escape(_subtitle(of))}</p>',
        *(f'<div class="note">{html.escape(n)}</div>' for n in (of.results or of.data).get("notes", [])),
    ]
    if of.results:
        body.append(section("Test", _results(of.results)))
    curves = [
        figures.draw("loss", draw.loss([of]), bool(of.steps)),
        figures.draw("ne", draw.ne([of]), bool(of.evals)),
    ]
    if of.progressive:
        curves.append(figures.draw("progressive", draw.ne([of], "progressive")))
    body.append(section("Training", grid(curves) + _trouble(of)))
    if of.results:
        shown = [figures.draw("calibration", draw.calibration([of]), bool(of.results["calibration_curve"]))]
        shown += [
            figures.draw(f"slice-{_file(name)}", draw.slices(of, name), bool(parts))
            for name, parts in of.results["slices"].items()
        ]
        body.append(section("Calibration and slices", grid(shown)))
    if of.numerics:
        body.append(section("Low precision", _numerics(of, figures)))
    body.append(section("Throughput and efficiency", _efficiency(of, figures)))
    body.append(section("Data and model", _facts(of.data, of.model)))
    body.append(section("Configuration", f"<pre>{html.escape(to_toml(of.config))}</pre>" + _environment(of.env)))
    run.report_file.write_text(page(of.name, body), encoding="utf-8")
    return run.report_file


def _results(results: dict[str, Any]) -> str:
    headings = [h for _, h in COLUMNS] + (["95% of NE"] if "intervals" in results else [])
    head = "<tr><th>task</th><th>predictor</th>" + "".join(f'<th class="n">{h}</th>' for h in headings) + "</tr>"
    lines, before = [], None
    for task, name, figures in rows(results):
        classes = ("model " if name == NAMES["model"] else "") + ("first" if before not in (None, task) else "")
        values = [cell(figures.get(key)) for key, _ in COLUMNS]
        if "intervals" in results:  # of the model alone; the baselines are there to be beaten by far
            values.append(interval(results["intervals"][task]["ne"]) if name == NAMES["model"] else "")
        cells = "".join(f'<td class="n">{value}</td>' for value in values)
        shown = html.escape(task) if task != before else ""
        lines.append(f'<tr class="{classes}"><td>{shown}</td><td>{html.escape(name)}</td>{cells}</tr>')
        before = task
    users = "; ".join(
        f"{task}: GAUC over {f['gauc_users']} users, {f['gauc_skipped_users']} with one class left out"
        for task, f in results["model"].items()
    )
    text = (
        f"{results['samples']} samples. Weights: {results['weights']}. NE is the log loss over the entropy of the base "
        f"rate. {users}. {above_the_best(results)}"
    )
    return f'<table>{head}{"".join(lines)}</table><p class="sub">{html.escape(text)}</p>'


def _trouble(of: Run) -> str:
    if not of.trouble:
        return ""
    lines = []
    for event in of.trouble[-SHOWN:]:
        hidden = ("event", "at", "step", "ranks")
        details = "; ".join(f"{k} {v}" for k, v in event.items() if k not in hidden and v is not None)
        worst = [w["sample"] for r in event.get("ranks", []) for w in r.get("worst", [])[:3]]
        if worst:
            details += f"; samples with the largest losses {worst}"
        lines.append((event["event"], str(event.get("step", "")), details))
    more = len(of.trouble) - len(lines)
    note = f'<p class="sub">{more} earlier ones are in events.jsonl</p>' if more > 0 else ""
    return table(("event", "step", "what is known of it"), lines, text=3) + note


def _numerics(of: Run, figures: Figures) -> str:
    """The operands' SQNR over time, and the worst of the last measurement."""
    last = of.numerics[-1]
    lines = [
        (r["layer"], f"{r['product']}.{r['tensor']}", r["spec"], cell(r["sqnr_db"]), f"{r['saturation'] or 0:.2%}",
         f"{r['underflow'] or 0:.2%}", cell(r["amax"]))
        for r in last["rows"][:SHOWN]
    ]  # fmt: skip
    note = (
        f"Step {last['step']}, worst first: 10 log10 of signal over quantisation error; share of elements beyond the "
        "format's largest number and share that became zero; the largest magnitude. A dash is exact, or not finite."
    )
    headings = ("layer", "operand", "format", "SQNR dB", "saturated", "underflow", "largest")
    figure = figures.draw("numerics", draw.numerics(of))
    return grid([figure]) + f'<p class="sub">{note}</p>' + table(headings, lines, text=3)


def _efficiency(of: Run, figures: Figures) -> str:
    shown = [
        figures.draw(
            "speed", draw.steps([of], "samples_per_s", "samples/s", "Throughput, running mean"), bool(of.steps)
        ),
        figures.draw("memory", draw.steps([of], "memory_bytes", "GiB", "Peak memory so far", 2**30), bool(of.steps)),
    ]
    if of.phases:
        ranks = len(of.phases[-1]["ranks"])
        shown.append(figures.draw("gantt", draw.gantt(of), height=1.6 + 0.25 * ranks))
        shown.append(figures.draw("phases", draw.phases([of]), height=1.8))
        if ranks > 1:
            shown.append(figures.draw("imbalance", draw.balance([of])))
    text = _throughput(of)
    if of.efficiency:
        mfu = of.efficiency["mfu"]
        shown.append(figures.draw("waterfall", draw.waterfall([of])))
        share = [cell(mfu[k]) if mfu[k] is None else f"{mfu[k]:.1%}" for k in ("end_to_end", "local")]
        text += pairs(
            [
                ("E2E MFU = local MFU x scaling ratio", f"{share[0]} = {share[1]} x {mfu['scaling_ratio']:.3f}"),
                ("counted as", mfu["stated"]),
            ]
        )
    return grid(shown) + text


def _throughput(of: Run) -> str:
    steps, model = of.steps, of.model
    if not steps:
        return "<p>No step yet.</p>"
    busy = sum(s["step_s"] + s["data_wait_s"] for s in steps)
    settled = steps[len(steps) // 10 :]  # the first steps allocate, compile and warm caches
    mean = sum(s["samples_per_s"] for s in settled) / len(settled)
    mfu = [s["mfu"] for s in settled if "mfu" in s]
    tflops = [s["tflops"] for s in settled if "tflops" in s]
    return pairs(
        [
            ("steps", len(steps)),
            ("training time", str(datetime.timedelta(seconds=round(busy)))),
            ("samples per second", f"{mean:,.0f}"),
            ("share spent waiting for data", f"{sum(s['data_wait_s'] for s in steps) / busy:.1%}"),
            ("useful TFLOP/s per rank", f"{sum(tflops) / len(tflops):.4g}" if tflops else None),
            ("MFU", f"{sum(mfu) / len(mfu):.1%} ({model.get('mfu')})" if mfu else model.get("mfu")),
            ("peak memory", f"{max(s['memory_bytes'] for s in steps) / 2**30:.2f} GiB"),
        ]
    )


def _facts(data: dict[str, Any], model: dict[str, Any]) -> str:
    parameters = model.get("parameters", {})
    items = [
        ("source", data.get("source")),
        ("samples", ", ".join(f"{k} {v:,}" for k, v in data.get("split", {}).items()) or None),
        ("schema fingerprint", data.get("fingerprint")),
        ("log digest", data.get("digest")),
        ("parameters", ", ".join(f"{k} {v:,}" for k, v in parameters.items()) or None),
        ("precision", model.get("precision")),
        (
            "linear layers in low precision",
            sum(r["engine"] != "-" for r in model.get("linear_layers", [])) if model else None,
        ),
        ("ranks", model.get("world")),
        ("device", model.get("device")),
    ]
    sharding = "\n".join(model.get("sharding", []))
    return (
        pairs(items) + f"<details><summary>Sharding of the tables</summary><pre>{html.escape(sharding)}</pre></details>"
    )


def _environment(env: dict[str, Any]) -> str:
    items = [(k, v) for k, v in env.items() if k != "versions"] + list(env["versions"].items())
    return f"<details><summary>Environment</summary>{pairs(items)}</details>"


def _subtitle(of: Run) -> str:
    where = f"{of.model.get('world', 1)} x {of.env['device']}"
    steps = of.steps[-1]["step"] if of.steps else 0
    return f"recipe {of.config.recipe}; started {of.env['started']}; {steps} steps on {where}"


def _file(name: str) -> str:
    return name.replace(":", "-").replace("/", "-")
