"""Write docs/notes/gem-train-walk.md: every command of gem-train once, with what it really printed.

    python tools/walk.py            # a few minutes on two CPU cores

The commands run one after another in an empty folder; a failing one ends the walk. Output is kept as it comes but for
what is cut (marked by a line of dots), the names of folders and the libraries' warnings about their own affairs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "notes" / "gem-train-walk.md"
CUT = 34  # lines of a command's output that are shown
NOISE = re.compile(r"fx_tracing|USDT|emulated on|_announce\(|UserWarning")

SHOP = r"""awk 'BEGIN { srand(1); print "user,time,item,price,click"
  for (i = 0; i < 4000; i++) printf "%d,%d,%d,%.2f,%d\n",
    rand() * 90, 1700000000 + i * 60, k = int(rand() * 50), 1 + k / 10, rand() < 0.1 + k / 200
  print "7,soon,3,1.30,0" }' > shop.csv
cat > shop.toml <<END
name = "shop"
user = "user"
columns = [
  { name = "user", kind = "id", role = "user", cardinality = 90 },
  { name = "item", kind = "id", role = "context", cardinality = 50 },
  { name = "price", kind = "float", role = "context" },
  { name = "click", kind = "id", role = "outcome", cardinality = 2 },
]
tasks = [{ name = "click", column = "click", equals = 1 }]
END"""

SCORE = """python - <<END
import sys
from gem_data import EventLog, Loader, LoaderConfig
sys.path.insert(0, "exported")
from scorer import ProgramScorer

log = EventLog.open("clicks")
config = LoaderConfig(batch_size=4, max_history=12)
batch = next(iter(Loader(log, range(len(log) - 4, len(log)), config, rank=0, world=1)))
scorer = ProgramScorer.open("exported")
print(scorer.tasks, scorer(batch), "gem_train" in sys.modules, sep="\\n")
END"""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A paragraph and the commands that it is about."""

    title: str
    text: str
    commands: tuple[str, ...]
    lines: int = CUT
    code: int = 0


WALK = (
    Stop(
        title="What is installed, and does it fit together: doctor",
        text="The exit code says whether the installation can be used.",
        commands=("gem-train doctor",),
        lines=60,
    ),
    Stop(
        title="Data: data make, data inspect",
        text="Simulated impressions, whose best possible NE is known.",
        commands=("gem-train data make --out clicks --set events=8000 --set seed=3", "gem-train data inspect clicks"),
    ),
    Stop(
        title="Data of your own: data prepare",
        text="A file and what its columns mean. The last row is broken: it is left out, and kept for you to look at.",
        commands=(SHOP, "gem-train data prepare files shop.csv --schema shop.toml --out shop"),
    ),
    Stop(
        title="Recipes and settings: recipes, show, validate",
        text="A recipe is a configuration to start from. What is set here is in the file, and every default with it.",
        commands=(
            "gem-train recipes",
            "gem-train show log --set data.path=clicks --set data.batch_size=128 --set data.max_history=12 \\\n"
            "  --set model.width=16 --set model.layers=1 --set inputs.exclude=user --set optim.lr=5e-3 \\\n"
            "  --set optim.warmup_steps=20 --set train.epochs=9 --set train.max_steps=150 \\\n"
            "  --set train.eval_every=50 --set train.checkpoint_every=50 > mine.toml",
            "gem-train validate mine.toml",
        ),
    ),
    Stop(
        title="A mistake",
        text="Mistakes are one line and exit code 2: here a setting that does not exist, with the one that was perhaps "
        "meant.",
        commands=("gem-train run --config mine.toml --set optim.lrate=0.1",),
        code=2,
    ),
    Stop(
        title="Before training: plan",
        text="Which layout, and how many parts of a step, on a machine that need not be there; FLOPs and lengths are "
        "measured on the data. The last line trains with it.",
        commands=(
            "gem-train plan large --topology h200-host --gpus 8 --batch 1024 \\\n"
            "  --set data.synthetic.events=5000 --set optim.accumulate=1",
        ),
    ),
    Stop(
        title="Training: run",
        text="Plain lines, since this is no terminal: one every ten seconds, one for each validation, and the test "
        "with what the model must beat. The folder holds all that is needed to understand or repeat it.",
        commands=("gem-train run --config mine.toml --out runs/one", "ls runs/one"),
    ),
    Stop(
        title="Stop and go on",
        text="SIGTERM (here at step 20) writes a checkpoint; `--resume` goes on as if nothing had happened. This run "
        "learns at another rate and tests averaged weights.",
        commands=(
            "gem-train run --config mine.toml --out runs/two --set optim.lr=2e-3 --set optim.ema_decay=0.98 &\n"
            "until grep -qs '\"step\": 20,' runs/two/metrics.jsonl; do sleep 0.1; done; kill $!; wait $!",
            "gem-train run --resume --out runs/two",
        ),
    ),
    Stop(
        title="A stream: progressive validation",
        text="In order of time each sample is predicted before it is trained on.",
        commands=(
            "gem-train run --config mine.toml --out runs/stream --set data.order=time --set train.epochs=1 \\\n"
            "  --set optim.schedule=wsd --set train.spike_sigmas=4 --set train.eval_every=25",
        ),
    ),
    Stop(
        title="Looking at runs: ls, show",
        text="",
        commands=("gem-train ls", "gem-train show runs/two"),
        lines=48,
    ),
    Stop(
        title="Figures by slice: eval",
        text="By any column, and for ids that training has never seen, with bootstrap intervals.",
        commands=("gem-train eval runs/one --by category --by new:user",),
        lines=64,
    ),
    Stop(
        title="Is the difference real: diff",
        text="Both runs on the same draws of users.",
        commands=("gem-train diff runs/one runs/two",),
    ),
    Stop(
        title="How well the machine is used: bench",
        text="On a CPU there is no MFU, since nobody states a CPU's peak; on a card in the table there is. Two cores "
        "that others use, too, give times that vary. The profile is for `gem-train plan --profile`.",
        commands=("gem-train bench runs/one --steps 3", "head -n 9 runs/one/profile.toml"),
        lines=40,
    ),
    Stop(
        title="One technique at a time: ladder",
        text="What this machine can't do is listed with the reason. GEM's techniques are for cards: on a CPU, where "
        "all run by the same reference, their times tell nothing.",
        commands=("gem-train ladder --config mine.toml --steps 3 --train-steps 20 --out runs/ladder",),
        lines=40,
    ),
    Stop(
        title="Pages: report",
        text="One self-contained page for a run or for several.",
        commands=("gem-train report runs/one --png", "gem-train report runs/one runs/two runs/stream --out all.html",
                  "ls runs/one/figures"),
    ),
    Stop(
        title="Against baselines: compare",
        text="GEM and baselines on the same batches. Eight thousand events tell little of any of them.",
        commands=("gem-train compare --config mine.toml --models gem,logistic,din --seeds 1 --out runs/compare",),
    ),
    Stop(
        title="Serving: export",
        text="The scorers need no gem-train; this one needs torch, numpy and pyarrow. gem-data makes the batch here.",
        commands=("gem-train export runs/one --out exported --rows int8", "ls exported", SCORE),
    ),
)  # fmt: skip


def run(command: str, folder: Path, code: int) -> tuple[str, float]:
    """The command's output, both streams as they come, and how long it took. Raises SystemExit where it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"OMP_NUM_THREADS": "1", "COLUMNS": "118", "XDG_CACHE_HOME": str(folder / ".cache"), "PATH": path}
    began = time.perf_counter()
    done = subprocess.run(
        ["bash", "-c", f"exec 2>&1; {command}"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **variables, "PYTHONWARNINGS": "ignore"},
    )
    seconds = time.perf_counter() - began
    if done.returncode != code:
        raise SystemExit(f"$ {command}\n{done.stdout[-3000:]}\nexit code {done.returncode}, expected {code}")
    programs = f"{Path(sys.executable).parent}{os.sep}"
    return done.stdout.replace(str(folder), ".").replace(programs, ""), seconds


def shown(output: str, lines: int) -> str:
    """At most `lines` lines, the middle cut out, without noise."""
    text = "\n".join(line.rstrip() for line in output.splitlines() if not NOISE.search(line))
    kept = re.sub(r"\n{3,}", "\n\n", text.strip("\n")).split("\n")
    if len(kept) > lines:
        half = lines // 2
        kept = [*kept[:half], f"... {len(kept) - 2 * half} lines ...", *kept[-half:]]
    return "\n".join(kept)


def main() -> None:
    """Walk and write the page."""
    parts, total = [], 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stop in WALK:
            parts.append(f"## {stop.title}")
            parts += [stop.text] if stop.text else []
            for command in stop.commands:
                output, seconds = run(command, folder, stop.code)
                print(f"{seconds:6.1f} s  {command.splitlines()[0][:100]}", flush=True)
                total += seconds
                text = shown(output, stop.lines)
                parts.append(f"```text\n$ {command}\n{text}\n```".replace("\n\n```", "\n```"))
    head = (
        "# A first walk through gem-train",
        f"Every command once, with what it printed; all of it took {total:.0f} s on {os.cpu_count()} CPU cores. "
        "This page is generated: `python tools/walk.py`.",
    )
    PAGE.write_text("\n\n".join((*head, *parts)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
