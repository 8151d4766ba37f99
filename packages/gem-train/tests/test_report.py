"""Reports: of one run and of several, whole in one file, the same in a browser as in the file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from gem_train.cli import main
from gem_train.events import read
from gem_train.report.figures import imbalance, phase_seconds
from gem_train.report.run import Run
from gem_train.run_dir import RunDir
from gem_train.testing import tiny_config

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
VOID = {"meta", "br", "hr", "img", "link", "input", "path", "use", "rect", "circle"}


class Balanced(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open, self.sections, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.sections.append(data)
        self.words.append(data)


def parsed(file):
    page = Balanced()
    page.feed(file.read_text(encoding="utf-8"))
    assert page.open == []
    return page


def alone(text):
    """Nothing is fetched: links go inside the page."""
    links = set(re.findall(r'(?:href|src)="([^"]+)"', text)) | set(re.findall(r"url\(([^)]+)\)", text))
    return all(link.startswith("#") for link in links)


@pytest.fixture(scope="module")
def pair(run_cli, finished_run, cache, tmp_path_factory):
    """The finished run with a bench and slices, and another with two streams' worth of settings."""
    folder = tmp_path_factory.mktemp("pair")
    one, two = folder / "one", folder / "two"
    shutil.copytree(finished_run, one)
    assert main(["bench", str(one), "--steps", "1", "--warm-up", "1", "--repeats", "1"]) == 0
    settings = ("optim.lr=1e-3", "data.order=time", "train.epochs=1", "train.spike_sigmas=0.5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gem_train.spikes.SETTLING", 5)
        assert run_cli(two, *settings) == 0
    return one, two


def test_a_report_shows_all_there_is(pair):
    one, two = pair
    assert main(["report", str(one), "--png"]) == 0
    page, text = parsed(one / "report.html"), (one / "report.html").read_text()
    assert page.sections == [
        "Test", "Training", "Calibration and slices", "Throughput and efficiency", "Data and model", "Configuration"
    ]  # fmt: skip
    assert alone(text)
    assert "Efficiency waterfall" in text
    assert "on each rank, lined up at the end of the loss" in text
    assert "E2E MFU = local MFU x scaling ratio" in text
    assert {p.stem for p in (one / "figures").iterdir()} == {
        "loss", "ne", "calibration", "slice-time", "slice-history", "speed", "memory", "gantt", "phases", "waterfall"
    }  # fmt: skip
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in (one / "figures").iterdir())
    assert main(["report", str(two)]) == 0
    text = (two / "report.html").read_text()
    assert "Progressive NE" in text
    assert "loss spike" in text
    spike = next(e for e in read(two / "events.jsonl") if e.get("event") == "loss spike")
    assert str(spike["ranks"][0]["worst"][0]["sample"]) in text


def test_every_plot_names_its_axes(pair):
    from gem_train.report import figures
    from matplotlib.figure import Figure

    one, two = (Run.read(RunDir(path)) for path in pair)
    both = [one, two]
    draws = [
        *(draw(both) for draw in (figures.loss, figures.ne, figures.calibration, figures.balance, figures.phases)),
        figures.ne([two], "progressive"),
        *(figures.slices(one, name) for name in ("time", "history")),
        *(figures.slices_of(both, name, "click") for name in ("time", "history")),
        figures.steps(both, "samples_per_s", "samples/s", "Throughput"),
        figures.gantt(one),
        figures.waterfall([one]),
    ]
    for draw in draws:
        axes = Figure().subplots()
        draw(axes)
        assert axes.get_xlabel()
        assert axes.get_ylabel() or any(label.get_text() for label in axes.get_yticklabels())
        assert axes.get_title()


def test_a_run_without_a_task_is_not_in_its_legend(pair):
    from gem_train.report import figures
    from matplotlib.figure import Figure

    one, two = (Run.read(RunDir(path)) for path in pair)
    for part in two.results["slices"]["time"]:
        del part["tasks"]["convert"]
    axes = Figure().subplots()
    figures.slices_of([one, two], "time", "convert")(axes)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one"]


def test_several_runs_are_compared_on_one_page(pair, tmp_path):
    one, two = pair
    out = tmp_path / "both.html"
    assert main(["report", str(one), str(two), "--out", str(out), "--png"]) == 0
    page, text = parsed(out), out.read_text()
    assert page.sections == [
        "Runs", "Test", "Against one, on the same samples", "Training", "Calibration and slices",
        "Throughput and efficiency",
    ]  # fmt: skip
    assert alone(text)
    assert "optim.lr: 0.003 -&gt; 0.001" in text
    assert "click: NE " in text
    assert len(list((tmp_path / "both").glob("*.png"))) == text.count("<svg")
    eval_two = json.loads((two / "eval.json").read_text())
    assert f"{eval_two['model']['click']['ne']:.4f}" in page.words


def test_runs_of_other_data_are_shown_without_a_verdict(pair, tmp_path):
    one, _ = pair
    other = tmp_path / "other"
    shutil.copytree(one, other)
    data = json.loads((other / "data.json").read_text())
    (other / "data.json").write_text(json.dumps({**data, "digest": "0" * 64}))
    assert main(["report", str(one), str(other), "--out", str(tmp_path / "x.html")]) == 0
    assert "were tested on different data" in (tmp_path / "x.html").read_text()


def test_runs_of_one_name_are_told_apart_by_their_folders(pair, tmp_path):
    one, _ = pair
    (tmp_path / "a").mkdir()
    shutil.copytree(one, tmp_path / "a" / "one")
    assert main(["report", str(one), str(tmp_path / "a" / "one"), "--out", str(tmp_path / "x.html")]) == 0
    text = (tmp_path / "x.html").read_text()
    assert str(one) in text
    assert str(tmp_path / "a" / "one") in text


def test_out_is_for_several(pair, capsys):
    assert main(["report", str(pair[0]), "--out", "x.html"]) == 2
    assert "--out is for the page about several runs" in capsys.readouterr().err


def test_the_numbers_behind_phases_and_imbalance(finished_run):
    run = Run.read(RunDir(finished_run))
    (looked,) = run.phases[1:]
    assert phase_seconds(run) == pytest.approx(dict(looked["ranks"][0]["phases"]))
    assert imbalance([{"flops": 1.0}, {"flops": 3.0}]) == 1.5


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; the pages' structure is checked above")
def test_a_browser_renders_the_pages_without_a_complaint(pair, tmp_path):
    one, two = pair
    out = tmp_path / "both.html"
    assert main(["report", str(one), str(two), "--out", str(out)]) == 0
    for file in (one / "report.html", out):
        shot = tmp_path / f"{file.stem}.png"
        common = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
                  "--enable-logging=stderr", "--virtual-time-budget=2000"]  # fmt: skip
        done = subprocess.run(
            [*common, f"--screenshot={shot}", "--window-size=1100,2400", file.as_uri()],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0
        assert "CONSOLE" not in done.stderr
        from matplotlib.image import imread

        picture = imread(shot)[..., :3]
        assert picture.shape[0] == 2400
        # The page's figures and text have left their colours all the way down.
        assert len({tuple(p) for p in picture[::40, ::10].reshape(-1, 3).round(2).tolist()}) > 10
        assert (picture[1600:2300].std(axis=(0, 1)) > 0.02).all()


def test_the_tiny_configuration_is_what_the_reports_are_of(finished_run, cache):
    assert RunDir(finished_run).read_config() == tiny_config(cache)
