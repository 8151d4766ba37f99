"""What the figures of a report show; each function gives what draws it, from the records of one run or of several.

A run is a `Run` of run.py: its name, steps, evals, events, results and efficiency.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from gem_train.measuring.names import NAMES
from gem_train.report.page import COLOURS, smoothed
from gem_train.report.run import Run

Draw = Callable[[Any], None]
PHASES = {"data": "#98a2b3", "forward": "#2563eb", "loss": "#f79009", "backward": "#039855", "optimizer": "#9e77ed"}


def loss(runs: Sequence[Run]) -> Draw:
    """The training loss, its running mean in front."""

    def draw(axes: Any) -> None:
        for run, colour in zip(runs, _colours(runs), strict=True):
            points = [(s["step"], s["loss"]) for s in run.steps if s["loss"] is not None]
            x, y = [p[0] for p in points], [p[1] for p in points]
            if len(runs) == 1:
                axes.plot(x, y, color="#c7d2fe", linewidth=0.8)
            axes.plot(x, smoothed(y), color=colour, linewidth=1.4, label=run.name)
        axes.set(xlabel="step", ylabel="training loss (nats)", title="Loss of each step, and its running mean")
        _legend(axes, runs)

    return draw


def ne(runs: Sequence[Run], kind: str = "eval") -> Draw:
    """NE of each task, over the validations or the windows of the progressive validation."""

    def draw(axes: Any) -> None:
        for run, colour in zip(runs, _colours(runs), strict=True):
            records = run.evals if kind == "eval" else run.progressive
            tasks = list(records[0]["tasks"]) if records else []
            for k, task in enumerate(tasks):
                points = [(e["step"], e["tasks"][task]["ne"]) for e in records if e["tasks"][task]["ne"] is not None]
                style = {"color": COLOURS[k] if len(runs) == 1 else colour, "linestyle": ("-", "--", ":", "-.")[k % 4]}
                label = task if len(runs) == 1 else f"{run.name}: {task}"
                axes.plot(*_columns(points), marker="o", markersize=3, label=label, **style)
        axes.axhline(1.0, color="#98a2b3", linewidth=0.8, linestyle="--")
        title = "Validation NE" if kind == "eval" else "Progressive NE: each sample before it is trained on"
        axes.set(xlabel="step", ylabel="NE", title=title)
        axes.legend(frameon=False, fontsize=7)

    return draw


def calibration(runs: Sequence[Run]) -> Draw:
    """Predicted against observed rates."""

    def draw(axes: Any) -> None:
        top = 0.0
        for run, colour in zip(runs, _colours(runs), strict=True):
            for k, (task, curve) in enumerate((run.results or {}).get("calibration_curve", {}).items()):
                top = max([top, *(max(p["predicted"], p["observed"]) for p in curve)])
                style = {"color": COLOURS[k] if len(runs) == 1 else colour, "linestyle": ("-", "--", ":", "-.")[k % 4]}
                label = task if len(runs) == 1 else f"{run.name}: {task}"
                x, y = [p["predicted"] for p in curve], [p["observed"] for p in curve]
                axes.plot(x, y, marker="o", markersize=3, label=label, **style)
        axes.plot([0, top * 1.05], [0, top * 1.05], color="#98a2b3", linewidth=0.8, linestyle="--")
        axes.set(xlabel="mean prediction", ylabel="observed rate", title="Calibration, ten equal groups")
        axes.legend(frameon=False, fontsize=7)

    return draw


def slices(run: Run, name: str) -> Draw:
    """NE of one run by the parts of a slicing."""
    parts = (run.results or {})["slices"][name]

    def draw(axes: Any) -> None:
        tasks = list(dict.fromkeys(task for p in parts for task in p["tasks"]))
        width = 0.8 / len(tasks)
        for k, task in enumerate(tasks):
            shown = [(i + k * width, _ne(p, task)) for i, p in enumerate(parts) if _ne(p, task) is not None]
            if shown:  # bars of nothing would stand in the legend in a colour of their own
                axes.bar(*_columns(shown), width=width, label=task, color=COLOURS[k])
        axes.axhline(1.0, color="#98a2b3", linewidth=0.8, linestyle="--")
        axes.set_xticks([i + 0.4 - width / 2 for i in range(len(parts))], [_label(name, p) for p in parts], fontsize=7)
        lowest = min([1.0, *(v for p in parts for t in tasks if (v := _ne(p, t)) is not None)])
        axes.set(xlabel=_slicing(name), ylabel="NE", title=f"NE by {name}", ylim=(0.5 * lowest, None))
        axes.legend(frameon=False, fontsize=7)

    return draw


def slices_of(runs: Sequence[Run], name: str, task: str) -> Draw:
    """NE of one task by the parts of a slicing, run beside run."""

    def draw(axes: Any) -> None:
        found = {run.name: (run.results or {})["slices"][name] for run in runs}
        labels = list(dict.fromkeys(_label(name, p, count=False) for parts in found.values() for p in parts))
        width, lowest = 0.8 / len(runs), 1.0
        for k, (run, colour) in enumerate(zip(runs, _colours(runs), strict=True)):
            shown = [
                (labels.index(_label(name, p, count=False)) + k * width, v)
                for p in found[run.name]
                if (v := _ne(p, task)) is not None
            ]
            lowest = min([lowest, *(v for _, v in shown)])
            if shown:
                axes.bar(*_columns(shown), width=width, label=run.name, color=colour)
        axes.axhline(1.0, color="#98a2b3", linewidth=0.8, linestyle="--")
        axes.set_xticks([i + 0.4 - width / 2 for i in range(len(labels))], labels, fontsize=7)
        axes.set(xlabel=_slicing(name), ylabel="NE", title=f"NE of {task} by {name}", ylim=(0.5 * lowest, None))
        axes.legend(frameon=False, fontsize=7)

    return draw


def steps(runs: Sequence[Run], key: str, label: str, title: str, scale: float = 1.0) -> Draw:
    """A number of each step."""

    def draw(axes: Any) -> None:
        for run, colour in zip(runs, _colours(runs), strict=True):
            points = [(s["step"], s[key] / scale) for s in run.steps if s.get(key) is not None]
            axes.plot(
                [p[0] for p in points], smoothed([p[1] for p in points]), color=colour, linewidth=1.2, label=run.name
            )
        axes.set(xlabel="step", ylabel=label, title=title, ylim=(0, None))
        _legend(axes, runs)

    return draw


def balance(runs: Sequence[Run]) -> Draw:
    """The heaviest rank's FLOPs over the average, where the phases were looked at."""

    def draw(axes: Any) -> None:
        for run, colour in zip(runs, _colours(runs), strict=True):
            points = [(e["step"], imbalance(e["ranks"])) for e in run.phases]
            axes.plot(*_columns(points), marker="o", markersize=3, color=colour, label=f"{run.name}")
        axes.set(xlabel="step", ylabel="heaviest rank / average", title="Imbalance of useful FLOPs", ylim=(0.98, None))
        _legend(axes, runs)

    return draw


def gantt(run: Run) -> Draw:
    """The phases of the last step that was looked at, a row for each rank, lined up where all leave the loss."""
    event = run.phases[-1]

    def draw(axes: Any) -> None:
        ends = []
        for rank in event["ranks"]:
            spans, at, meet = [], 0.0, 0.0
            for name, seconds in rank["phases"]:
                spans.append((name, at, seconds))
                at += seconds
                meet = at if name == "loss" else meet
            ends.append((spans, meet))
        latest = max(meet for _, meet in ends)
        for row, (spans, meet) in enumerate(ends):
            for name, start, seconds in spans:
                begin = (start + latest - meet) * 1e3
                axes.barh(row, seconds * 1e3, left=begin, height=0.7, color=PHASES.get(name, "#475467"))
        for name, colour in PHASES.items():
            axes.barh(0, 0, color=colour, label=name)
        axes.set_yticks(range(len(ends)), [f"rank {r}" for r in range(len(ends))], fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds", title=f"Step {event['step']} on each rank, lined up at the end of the loss")
        axes.figure.legend(frameon=False, ncols=5, fontsize=7, loc="outside lower center")

    return draw


def phases(runs: Sequence[Run]) -> Draw:
    """The shares of a step's phases, averaged over ranks and looks, without the first (it warms up)."""

    def draw(axes: Any) -> None:
        for row, run in enumerate(runs):
            shares = phase_seconds(run)
            whole, left = sum(shares.values()), 0.0
            for name, seconds in shares.items():
                axes.barh(row, 100 * seconds / whole, left=left, height=0.6, color=PHASES.get(name, "#475467"))
                left += 100 * seconds / whole
        for name, colour in PHASES.items():
            axes.barh(0, 0, color=colour, label=name)
        axes.set_yticks(range(len(runs)), [r.name for r in runs], fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="% of a step", title="Phases of a step, mean of ranks and looks", xlim=(0, 100))
        axes.figure.legend(frameon=False, ncols=5, fontsize=7, loc="outside lower center")

    return draw


def phase_seconds(run: Run) -> dict[str, float]:
    """Mean seconds of each phase over ranks and looks, the first look left out where there is another."""
    looks = run.phases[1:] or run.phases
    sums: dict[str, float] = {}
    count = sum(len(e["ranks"]) for e in looks)
    for event in looks:
        for rank in event["ranks"]:
            for name, seconds in rank["phases"]:
                sums[name] = sums.get(name, 0.0) + seconds / count
    return sums


def waterfall(runs: Sequence[Run]) -> Draw:
    """Where a step's time goes, from `gem-train bench`: the layers as fast as alone, then every loss."""

    def draw(axes: Any) -> None:
        found = [(run.name, (run.efficiency or {})["waterfall"]) for run in runs]
        names = [n for n in NAMES if any(abs(parts[n]) > 0 for _, parts in found)]
        height = 0.8 / len(found)
        for k, (name, parts) in enumerate(found):
            left = 0.0
            for row, part in enumerate(names):
                seconds = parts[part] * 1e3
                colour = "#039855" if part == "local" else "#d92d20" if seconds >= 0 else "#0e9384"
                colour = colour if len(found) == 1 else _colours(runs)[k]
                axes.barh(row + k * height, seconds, left=left, height=height * 0.9, color=colour)
                axes.text(left + max(seconds, 0), row + k * height, f" {seconds / parts['step'] / 10:.1f}%", fontsize=7,
                          va="center")  # fmt: skip
                left += seconds
            axes.barh(0, 0, color=_colours(runs)[k], label=name)
        axes.set_yticks([i + 0.4 - height / 2 for i in range(len(names))], [NAMES[n] for n in names], fontsize=7)
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds", title="Efficiency waterfall of a step")
        _legend(axes, runs)

    return draw


def numerics(run: Run, worst: int = 6) -> Draw:
    """The SQNR of the operands of low-precision layers over the steps, grey but for those that end lowest."""

    def draw(axes: Any) -> None:
        curves: dict[str, list[tuple[int, float]]] = {}
        for record in run.numerics:
            for row in record["rows"]:
                points = curves.setdefault(f"{row['layer']} {row['product']}.{row['tensor']}", [])
                if row["sqnr_db"] is not None:  # exact, or not finite: the table says which
                    points.append((record["step"], row["sqnr_db"]))
        curves = {name: points for name, points in curves.items() if points}
        named = sorted(curves, key=lambda name: curves[name][-1][1])[:worst]
        for name, points in curves.items():
            if name not in named:
                axes.plot(*_columns(points), color="#d0d5dd", linewidth=0.6)
        for name, colour in zip(named, COLOURS, strict=False):
            axes.plot(*_columns(curves[name]), color=colour, marker="o", markersize=2, linewidth=1.2, label=name)
        axes.set(xlabel="step", ylabel="SQNR (dB)", title="Low-precision operands, the worst named")
        if named:
            axes.legend(frameon=False, fontsize=6)

    return draw


def _columns(points: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [x for x, _ in points], [y for _, y in points]


def _colours(runs: Sequence[Run]) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(runs))]


def _legend(axes: Any, runs: Sequence[Run]) -> None:
    if len(runs) > 1:
        axes.legend(frameon=False, fontsize=7)


def _ne(part: dict[str, Any], task: str) -> float | None:
    value: float | None = part["tasks"].get(task, {}).get("ne")
    return value


def _slicing(name: str) -> str:
    """What the parts of a slicing are, and in which unit."""
    return {"time": "first sample of each equal part (UTC)", "history": "events in the history"}.get(name, name)


def _label(name: str, part: dict[str, Any], *, count: bool = True) -> str:
    if name == "time":
        return datetime.datetime.fromtimestamp(part["from"], datetime.UTC).strftime("%Y-%m-%d\n%H:%M")
    if name == "history":
        low, high = part["from"], part["to"]
        text = f"{low}+" if high is None else str(low) if low == high else f"{low}–{high}"
        return f"{text}\nn {part['samples']}" if count else text
    return str(part["value"])


def imbalance(ranks: list[dict[str, Any]]) -> float:
    """The heaviest rank's FLOPs over the average, of the ranks of a "phases" event; 1 is perfect."""
    flops = [r["flops"] for r in ranks]
    return max(flops) * len(flops) / sum(flops) if sum(flops) else 1.0
