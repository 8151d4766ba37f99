"""Draw the diagrams of the README and the site as SVG: `python tools/drawings.py [--check]`.

Plain boxes, labels and arrows, with nothing but the standard library: the same source gives the same bytes.
`--check` changes nothing and exits with 1 when a file is out of date.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from html import escape
from pathlib import Path

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
INK, PALE, WHITE = "#1f2937", "#eef2f7", "#ffffff"
BLUE, GREEN, ORANGE, PURPLE = "#cfe3fb", "#d3efd9", "#fde3c3", "#e6dbf7"


class Drawing:
    """A canvas; coordinates are pixels from the upper left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{INK}">\n'
            f"<title>{escape(title)}</title>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" fill="{WHITE}"/>\n'
        )
        self.parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, bold: bool = False, anchor: str = "middle"
    ) -> None:
        """One line of text, its middle (or start) at x."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *lines: str,
        fill: str = PALE,
        bold: bool = True,
        dash: bool = False,
    ) -> None:
        """A rounded box; its first line is bold, the others are small."""
        dashed = ' stroke-dasharray="5 4"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" stroke="{INK}" '
            f'stroke-width="1"{dashed}/>'
        )
        top = y + h / 2 - 8 * (len(lines) - 1) + 4
        for i, line in enumerate(lines):
            self.text(x + w / 2, top + 16 * i, line, bold=bold and i == 0, size=13 if i == 0 else 11)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, words: str = "", *, both: bool = False) -> None:
        """A straight arrow, with its label beside the middle."""
        start = ' marker-start="url(#tip)"' if both else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" stroke-width="1.2" '
            f'marker-end="url(#tip)"{start}/>'
        )
        if words:
            self.text((x1 + x2) / 2 + 5, (y1 + y2) / 2 - 4, words, size=11, anchor="start" if x1 == x2 else "middle")

    def svg(self) -> str:
        """The file's content."""
        return self.head + "\n".join(self.parts) + "\n</svg>\n"


def house() -> Drawing:
    """The six packages: who builds on whom, and what crosses the walls."""
    d = Drawing(760, 352, "The six packages and what crosses the walls between them")
    d.box(
        20,
        16,
        720,
        62,
        "gem-train",
        "recipes, trainer, metrics, reports, the command: assembles the others",
        fill=ORANGE,
    )
    top, low, height = 132, 266, 70
    d.box(20, top, 210, height, "gem-data", "event logs to jagged batches", "numpy, pyarrow, duckdb, torch", fill=GREEN)
    d.box(275, top, 210, height, "gem-model", "the GEM model and its baselines", "torch, torchrec", fill=BLUE)
    d.box(530, top, 210, height, "gem-parallel", "layouts, tables, checkpoints", "torch, torchrec", fill=PURPLE)
    d.box(275, low, 210, height, "gem-kernels", "jagged attention, GDPA, norms", "torch, triton", fill=BLUE)
    d.box(20, low, 210, height, "gem-lowprec", "formats, recipes, FP8 linear", "torch", fill=BLUE)
    for x in (125, 380, 635):
        d.arrow(x, 78, x, top - 2)
    d.arrow(230, top + 35, 273, top + 35)
    d.text(251, top + 26, "batch", size=11)
    d.arrow(485, top + 35, 528, top + 35)
    d.text(507, top + 26, "roles", size=11)
    d.arrow(380, top + height, 380, low - 2, "plain tensors [T, H, D], offsets [B + 1]")
    d.arrow(230, low + 35, 273, low + 35)
    d.text(125, low - 10, "converts a model by layer name", size=11)
    return d


def axes() -> Drawing:
    """Five axes over two views of the same 16 ranks."""
    d = Drawing(860, 520, "Five axes of parallelism over the same ranks")
    d.text(20, 28, "Dense parameters: world = replicate x FSDP (an expert axis inside it)", bold=True, anchor="start")
    for zone in range(2):
        x = 20 + zone * 420
        d.box(x, 44, 400, 178, fill=WHITE, dash=True)
        d.text(x + 12, 62, f"replica {zone}: an FSDP shard group (one zone)", size=11, anchor="start")
        for host in range(2):
            hx = x + 14 + host * 190
            d.box(hx, 72, 182, 96, fill=PALE)
            d.text(hx + 8, 88, "host: expert axis", size=11, anchor="start")
            for gpu in range(4):
                rank = zone * 8 + host * 4 + gpu
                d.box(hx + 8 + gpu * 42, 96, 38, 30, f"{rank}", fill=BLUE)
                d.box(hx + 8 + gpu * 42, 132, 38, 26, f"E{gpu % 2}", fill=ORANGE, bold=False)
        d.text(x + 200, 188, "all-gather of parameters, reduce-scatter of gradients in the group", size=11)
        d.text(x + 200, 206, "all-gather / reduce-scatter of activations between experts, in the host", size=11)
    d.arrow(370, 234, 490, 234, both=True)
    d.text(430, 250, "all-reduce of gradient shards between replicas", size=11)
    d.text(20, 292, "Tables: world = table shard x table copies (v3, fully sharded)", bold=True, anchor="start")
    for host in range(4):
        x = 20 + host * 210
        d.box(x, 308, 200, 112, fill=WHITE, dash=True)
        d.text(x + 10, 324, f"host {host}: the copies of shard {host}", size=11, anchor="start")
        for gpu in range(4):
            d.box(x + 10 + gpu * 46, 334, 42, 30, f"{host * 4 + gpu}", fill=GREEN)
            d.box(x + 10 + gpu * 46, 370, 42, 26, f"S{host}.{gpu}", fill=PURPLE, bold=False)
        d.text(x + 100, 412, "all-gather, reduce-scatter", size=11)
    for gpu in range(4):
        y = 434 + gpu * 18
        d.arrow(41 + gpu * 46, y, 41 + gpu * 46 + 630, y, both=True)
    d.text(
        430,
        514,
        "all-to-all of ids, embeddings and gradients among the ranks with the same place in their hosts",
        size=11,
    )
    return d


def efficiency() -> Drawing:
    """From the peak to the end-to-end MFU."""
    d = Drawing(760, 236, "How MFU is accounted for")
    bars = [
        (700, PALE, "dense peak of the card x time of the step", ""),
        (
            520,
            BLUE,
            "local MFU: every layer alone on one device",
            "time in which a layer does not multiply at full rate",
        ),
        (
            400,
            GREEN,
            "end-to-end MFU",
            "exposed communication, imbalance, recomputation, waiting for data, launch gaps",
        ),
    ]
    for i, (width, fill, words, lost) in enumerate(bars):
        y = 16 + 78 * i
        d.box(30, y, width, 44, words, fill=fill)
        if lost:
            d.text(30, y - 10, f"less what is lost to {lost}", size=11, anchor="start")
    d.text(440, 200, "= local MFU x scaling ratio", anchor="start", bold=True)
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {"house.svg": house, "axes.svg": axes, "mfu.svg": efficiency}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the files are up to date")
    check = parser.parse_args().check
    for name, draw in DRAWINGS.items():
        path, fresh = FIGURES / name, draw().svg()
        if check and (not path.exists() or path.read_text() != fresh):
            raise SystemExit(f"{path.name} is out of date; run python tools/drawings.py")
        if not check:
            path.write_text(fresh)


if __name__ == "__main__":
    main()
