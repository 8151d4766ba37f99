"""The table of presets in docs/model.md, made from the code.

`python tools/model_tables.py` rewrites it, `--check` compares.

Parameters are counted on a model without memory; FLOPs are those of `gem_model.flops` for the preset's workload with
half-filled histories; activations are what `gem_train.planning` reckons with, in bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gem_model import GEM, preset
from gem_model.flops import unit_flops
from gem_model.presets import PRESETS, workload
from gem_model.roles import roles
from gem_train.planning import KEPT_BYTES, activations

PAGE = Path(__file__).parents[1] / "docs" / "model.md"
BEGIN, END = "<!-- presets: made by tools/model_tables.py -->", "<!-- end of presets -->"
SAMPLES = 64  # of the workload's batch, evenly over its lengths: FLOPs of every sample would only take longer


def table() -> str:
    """The lines between the marks."""
    lines = [
        "| preset | width x layers, heads | histories | dense | experts | tables | GFLOPs a sample, forward | "
        "training step, TFLOP | activations a sample |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in PRESETS:
        config, work = preset(name), workload(name)
        count = {"dense": 0, "expert": 0, "table": 0}
        model = GEM(config, work.inputs, device="meta")
        role = roles(model)
        for parameter, values in model.named_parameters():
            count[role[parameter]] += values.numel()
        step = work.batch // SAMPLES if work.batch > SAMPLES else 1
        lengths = {s: n[::step] for s, n in work.lengths().items()}
        samples = len(next(iter(lengths.values())))
        flops = sum(unit_flops(config, work.inputs, lengths).values()) / samples
        kept = sum(activations(config, work.inputs, {s: sum(n) / samples for s, n in lengths.items()}).values())
        cells = [
            name,
            f"{config.width} x {config.layers}, {config.heads}",
            f"{work.batch} x ({', '.join(f'{n:,}' for n in work.longest.values())})",
            *(_short(count[kind]) for kind in ("dense", "expert", "table")),
            f"{flops / 1e9:.3g}",
            f"{3 * flops * work.batch / 1e12:.3g}",
            f"{kept * KEPT_BYTES['bf16'] / 2**20:.3g} MiB",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _short(count: int) -> str:
    """Three digits: 499 M, 1.13 T."""
    if not count:
        return "–"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def main() -> int:
    """Write the page, or say whether it is up to date."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    fresh = f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
    if "--check" in sys.argv:
        if fresh != page:
            print(f"{PAGE} is not what the code says; run python tools/model_tables.py", file=sys.stderr)
        return int(fresh != page)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
