"""One self-contained page about a run: report.html, made from the files of its folder alone."""

from __future__ import annotations

import datetime
import html
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gem_train.config import to_toml
from gem_train.events import read
from gem_train.run_dir import RunDir, read_json
from gem_train.table import COLUMNS, NAMES, above_the_best, cell, interval, rows

CSS = """
:root { --ink: #1d2330; --soft: #667085; --line: #e3e6ec; --accent: #2563eb; --note: #fff7e0; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink); background: #f7f8fa; }
body { margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 10px; }
p.sub { color: var(--soft); margin: 0 0 20px; }
section, .note { background: #fff; border: 1px solid var(--line); border-radius: 8px; }
section { padding: 4px 20px 18px; margin: 16px 0; }
.note { background: var(--note); padding: 12px 20px; margin: 16px 0; font-weight: 600; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 12px; }
.figures svg { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); }
th { text-align: left; color: var(--soft); font-weight: 600; } .n { text-align: right; }
tr.model td { font-weight: 600; } tr.first td { border-top: 2px solid var(--line); }
pre { background: #f2f4f7; border-radius: 6px; padding: 12px; overflow: auto; font-size: 13px; }
details summary { cursor: pointer; color: var(--accent); margin: 12px 0; }
"""


def write_report(run: RunDir) -> Path:
    """Make report.html of what the folder holds so far; a run that was not tested yet has no table of figures.

    Raises UserError where there is not even a step to show.
    """
    metrics = read(run.metrics_file)
    steps = [r for r in metrics if r["kind"] == "step"]
    evals = [r for r in metrics if r["kind"] == "eval"]
    results = read_json(run.eval_file) if run.eval_file.exists() else None
    env, config = read_json(run.env_file), run.read_config()
    model = read_json(run.model_file) if run.model_file.exists() else {}
    data = read_json(run.data_file) if run.data_file.exists() else {}
    body = [
        f"<h1>{html.escape(run.path.name)}</h1>",
        f'<p class="sub">{html.escape(_subtitle(config.recipe, env, steps, model))}</p>',
        *(f'<div class="note">{html.escape(n)}</div>' for n in (results or data).get("notes", [])),
    ]
    if results:
        body.append(_section("Test", _results(results)))
    body.append(_section("Training", f'<div class="figures">{_loss(steps)}{_ne(evals)}</div>'))
    if results:
        body.append(
            _section("Calibration and slices", f'<div class="figures">{_calibration(results)}{_slices(results)}</div>')
        )
    body.append(_section("Throughput", f'<div class="figures">{_speed(steps)}</div>{_throughput(steps, model)}'))
    body.append(_section("Data and model", _facts(data, model)))
    body.append(_section("Configuration", f"<pre>{html.escape(to_toml(config))}</pre>" + _environment(env)))
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(run.path.name)}</title><style>{CSS}</style></head><body><main>{''.join(body)}</main></body></html>"
    )
    run.report_file.write_text(page, encoding="utf-8")
    return run.report_file


# Tables.


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


def _table(pairs: Sequence[tuple[str, Any]]) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in pairs if v is not None
    )
    return f"<table>{cells}</table>"


def _facts(data: dict[str, Any], model: dict[str, Any]) -> str:
    parameters = model.get("parameters", {})
    pairs = [
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
        _table(pairs)
        + f"<details><summary>Sharding of the tables</summary><pre>{html.escape(sharding)}</pre></details>"
    )


def _environment(env: dict[str, Any]) -> str:
    pairs = [(k, v) for k, v in env.items() if k != "versions"] + list(env["versions"].items())
    return f"<details><summary>Environment</summary>{_table(pairs)}</details>"


def _throughput(steps: list[dict[str, Any]], model: dict[str, Any]) -> str:
    if not steps:
        return "<p>No step yet.</p>"
    busy = sum(s["step_s"] + s["data_wait_s"] for s in steps)
    settled = steps[len(steps) // 10 :]  # the first steps allocate, compile and warm caches
    mean = sum(s["samples_per_s"] for s in settled) / len(settled)
    mfu = [s["mfu"] for s in settled if "mfu" in s]
    tflops = [s["tflops"] for s in settled if "tflops" in s]
    pairs = [
        ("steps", len(steps)),
        ("training time", str(datetime.timedelta(seconds=round(busy)))),
        ("samples per second", f"{mean:,.0f}"),
        ("share spent waiting for data", f"{sum(s['data_wait_s'] for s in steps) / busy:.1%}"),
        ("useful TFLOP/s per rank", f"{sum(tflops) / len(tflops):.4g}" if tflops else None),
        ("MFU", f"{sum(mfu) / len(mfu):.1%} ({model.get('mfu')})" if mfu else model.get("mfu")),
        ("peak memory", f"{max(s['memory_bytes'] for s in steps) / 2**30:.2f} GiB"),
    ]
    return _table(pairs)


# Plots.


def _loss(steps: list[dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        x, y = [s["step"] for s in steps], [s["loss"] for s in steps]
        axes.plot(x, y, color="#c7d2fe", linewidth=0.8)
        axes.plot(x, _smoothed(y), color="#2563eb", linewidth=1.6)
        axes.set(xlabel="step", ylabel="training loss (nats)", title="Loss of each step, and its running mean")

    return _svg(draw, bool(steps))


def _ne(evals: list[dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        for task in evals[0]["tasks"]:
            points = [(e["step"], e["tasks"][task]["ne"]) for e in evals if e["tasks"][task]["ne"] is not None]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=task)
        axes.axhline(1.0, color="#98a2b3", linewidth=0.8, linestyle="--")
        axes.set(xlabel="step", ylabel="NE", title="Validation NE")
        axes.legend(frameon=False)

    return _svg(draw, bool(evals))


def _calibration(results: dict[str, Any]) -> str:
    def draw(axes: Any) -> None:
        curves = results["calibration_curve"]
        top = max(max(p["predicted"], p["observed"]) for c in curves.values() for p in c) * 1.05
        axes.plot([0, top], [0, top], color="#98a2b3", linewidth=0.8, linestyle="--")
        for task, curve in curves.items():
            axes.plot(
                [p["predicted"] for p in curve], [p["observed"] for p in curve], marker="o", markersize=3, label=task
            )
        axes.set(xlabel="mean prediction", ylabel="observed rate", title="Calibration, ten equal groups")
        axes.legend(frameon=False)

    return _svg(draw, bool(results["calibration_curve"]))


def _slices(results: dict[str, Any]) -> str:
    def by_time(axes: Any) -> None:
        parts = results["slices"]["time"]
        labels = [datetime.datetime.fromtimestamp(p["from"], datetime.UTC).strftime("%Y-%m-%d") for p in parts]
        _bars(axes, parts, labels, "NE by time (equal parts, from)")

    def by_history(axes: Any) -> None:
        parts = results["slices"]["history"]
        labels = [f"{_range(p['from'], p['to'])}\nn {p['samples']}" for p in parts]
        _bars(axes, parts, labels, "NE by events in the history")

    return _svg(by_time, bool(results["slices"]["time"])) + _svg(by_history, bool(results["slices"]["history"]))


def _bars(axes: Any, parts: list[dict[str, Any]], labels: list[str], title: str) -> None:
    tasks = list(dict.fromkeys(task for p in parts for task in p["tasks"]))
    width = 0.8 / len(tasks)
    for k, task in enumerate(tasks):
        values = [p["tasks"].get(task, {}).get("ne") for p in parts]
        shown = [(i + k * width, v) for i, v in enumerate(values) if v is not None]
        axes.bar([x for x, _ in shown], [v for _, v in shown], width=width, label=task)
    axes.axhline(1.0, color="#98a2b3", linewidth=0.8, linestyle="--")
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(parts))], labels, fontsize=8)
    axes.set(ylabel="NE", title=title, ylim=(0.5 * min([1.0, *_values(parts)]), None))
    axes.legend(frameon=False)


def _range(low: int, high: int | None) -> str:
    if high is None:
        return f"{low}+"
    return str(low) if low == high else f"{low}–{high}"


def _values(parts: list[dict[str, Any]]) -> list[float]:
    return [f["ne"] for p in parts for f in p["tasks"].values() if f["ne"] is not None]


def _speed(steps: list[dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        axes.plot(
            [s["step"] for s in steps], _smoothed([s["samples_per_s"] for s in steps]), color="#2563eb", linewidth=1.2
        )
        axes.set(xlabel="step", ylabel="samples/s", title="Throughput, running mean", ylim=(0, None))

    return _svg(draw, bool(steps))


def _smoothed(values: Sequence[float], window: int = 20) -> list[float]:
    """The mean of the last `window` values."""
    return [sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i + 1 - window) : i + 1]]]


def _svg(draw: Callable[[Any], None], there: bool) -> str:
    """A figure as inline SVG; without data, a sentence."""
    if not there:
        return "<p>Nothing to plot yet.</p>"
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A fixed salt makes the ids, and so the page, the same each time.
    with rc_context(
        {"svg.hashsalt": "gem-train", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        draw(figure.subplots())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>"


def _subtitle(recipe: str, env: dict[str, Any], steps: list[dict[str, Any]], model: dict[str, Any]) -> str:
    where = f"{model.get('world', 1)} x {env['device']}"
    return f"recipe {recipe}; started {env['started']}; {steps[-1]['step'] if steps else 0} steps on {where}"
