"""The frame of a report: one HTML file with its style and its figures inside, nothing fetched from anywhere."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

CSS = """
:root { --ink: #1d2330; --soft: #667085; --line: #e3e6ec; --accent: #2563eb; --note: #fff7e0; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink); background: #f7f8fa; }
body { margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 10px; }
p.sub { color: var(--soft); margin: 0 0 20px; }
section, .note { background: #fff; border: 1px solid var(--line); border-radius: 8px; }
section { padding: 4px 20px 18px; margin: 16px 0; overflow-x: auto; }
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
COLOURS = ("#2563eb", "#dc6803", "#039855", "#9e77ed", "#d92d20", "#0e9384", "#b54708", "#475467")


class Figures:
    """Draws figures as inline SVG, and as PNG files where there is a folder for them."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def draw(self, name: str, draw: Callable[[Any], None], there: bool = True, *, height: float = 3.2) -> str:
        """A figure as inline SVG; without data, a sentence."""
        if not there:
            return "<p>Nothing to plot yet.</p>"
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        # A fixed salt makes the ids, and so the page, the same each time; another one for each figure keeps them apart.
        style: dict[str, Any] = {"svg.hashsalt": f"gem-train {name}", "font.size": 9}
        style |= {"axes.spines.top": False, "axes.spines.right": False}
        with rc_context(style):  # type: ignore[arg-type]
            figure = Figure(figsize=(5.6, height), layout="constrained")
            draw(figure.subplots())
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None})
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(self.folder / f"{name}.png", dpi=150)
        return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)


def grid(figures: Iterable[str]) -> str:
    """Figures side by side, as many as there is room for."""
    return f'<div class="figures">{"".join(figures)}</div>'


def section(title: str, content: str) -> str:
    """A part of the page with its heading."""
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>"


def pairs(items: Sequence[tuple[str, Any]]) -> str:
    """A table of names and values; a None is left out."""
    cells = "".join(
        f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in items if v is not None
    )
    return f"<table>{cells}</table>"


def table(headings: Sequence[str], lines: Iterable[Sequence[str]], *, text: int = 1) -> str:
    """A table whose first `text` columns are words and the others numbers."""

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = ["" if i < text else ' class="n"' for i in range(len(cells))]
        parts = [f"<{tag}{kind}>{html.escape(c)}</{tag}>" for kind, c in zip(kinds, cells, strict=True)]
        return f"<tr>{''.join(parts)}</tr>"

    return f"<table>{row('th', headings)}{''.join(row('td', cells) for cells in lines)}</table>"


def page(title: str, body: Iterable[str]) -> str:
    """The whole document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{CSS}</style></head><body><main>{''.join(body)}</main></body></html>"
    )


def smoothed(values: Sequence[float], window: int = 20) -> list[float]:
    """The mean of the last `window` values."""
    return [sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i + 1 - window) : i + 1]]]
