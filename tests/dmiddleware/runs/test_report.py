"""The HTML page about runs, as a browser draws it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.colors import to_hex
from matplotlib.image import imread
from PIL import Image

from dmiddleware.launch.cli import ditask
from dmiddleware.runs import find_runs
from dmiddleware.runs.comparison_figure import draw_metrics
from dmiddleware.runs.metrics_file import METRICS_FILE
from dmiddleware.runs.report import write_report
from tests.dmiddleware.runs.written_runs import write_run

BROWSERS = ("chromium", "google-chrome", "chromium-browser")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for side, top in (("a", 10.0), ("b", 20.0)):
        for seed in range(2):
            settings = {"seed": seed, "policy": {"learning_rate": top, "note": "<b>&"}}
            returns = [top * at / 20 + seed for at in range(1, 21)]
            write_run(Path("runs", side, f"seed-{seed}"), returns, settings=settings)


def browse(page: str, *options: str) -> str:
    """Open a page in a real browser that reaches no host, and return what it prints."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None and "CI" not in os.environ:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}")
    assert browser is not None, "apt-get install chromium"
    alone = [
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={Path('profile').resolve()}",
    ]
    quiet = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command = [browser, *quiet, *alone, *options, Path(page).resolve().as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return run.stdout


@pytest.mark.process
def test_a_browser_without_a_network_draws_the_page() -> None:
    videos = Path("runs/a/seed-0/videos")
    videos.mkdir()
    Image.fromarray(np.full((40, 40, 3), (255, 0, 255), np.uint8)).save(videos / "100.gif")
    write_report("page.html", "runs/a", "better=runs/b")
    dom = browse("page.html", "--dump-dom")
    assert dom.count("<svg") == 3 and dom.count("<figcaption>") == 4
    for text in ("better", "policy.learning_rate", "learn/total_loss", "&lt;b&gt;&amp;"):
        assert text in dom
    browse("page.html", "--screenshot=page.png", "--window-size=1200,3000")
    picture = (imread("page.png")[..., :3] * 255).round()
    for color in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E), (255, 0, 255)):
        assert (abs(picture - color).max(-1) < 6).sum() > 100, f"nothing in the color {color}"


@pytest.mark.parametrize("n_runs", [2, 14, 25])
def test_each_run_has_a_color_of_its_own_and_a_place_in_the_legend(n_runs: int) -> None:
    for seed in range(n_runs):
        write_run(Path("many", f"seed-{seed}"), [1.0 * seed, 2.0 * seed])
    figure = draw_metrics({"x": find_runs("many"), "a": find_runs("runs/a")}, ["eval/return_mean"])
    (plot,) = figure.axes
    assert len({to_hex(line.get_color()) for line in plot.lines}) == len(plot.lines) == n_runs + 2
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.texts]
    assert len(texts) == n_runs + 2 and "a: runs/a/seed-1" in texts
    assert plot.get_xlabel() == "env steps"


def test_the_page_loads_nothing() -> None:
    write_report("page.html", "runs")
    page = Path("page.html").read_text()
    sources = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')> ]+)", page)
    assert all(one.startswith(("#", "data:")) for one in sources)
    assert "<script" not in page and "@import" not in page


def test_seconds_of_middleware_are_shown_by_process() -> None:
    run = Path("runs/a/seed-0")
    for name, seconds in ((METRICS_FILE, 0.25), ("metrics.node-3.jsonl", 0.5)):
        with (run / name).open("a") as lines:
            lines.write(f'{{"env_step": 9999, "time_s/Collect": {seconds}}}\n')
    write_report("page.html", "runs/a")
    page = Path("page.html").read_text()
    assert re.search(r"lead</td><td>Collect</td><td class=\"number\">250 ms", page)
    assert re.search(r"node-3</td><td>Collect</td><td class=\"number\">500 ms", page)


@pytest.mark.slow
def test_without_a_timer_the_page_says_how_to_measure() -> None:
    write_report("page.html", "runs/a")
    assert "StepTimer(log=True)" in Path("page.html").read_text()


@pytest.mark.slow
def test_a_video_that_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    videos = Path("runs/a/seed-0/videos")
    videos.mkdir()
    (videos / "film.mp4").write_bytes(bytes(8 * 2**20 + 1))
    write_report("page.html", "runs/a")
    assert "film.mp4 is larger than 8 MiB" in Path("page.html").read_text()


def test_the_command_writes_the_page_and_refuses_in_one_line() -> None:
    result = CliRunner().invoke(ditask, ["report", "runs/a", "--output", "page.html"])
    assert result.exit_code == 0 and result.output == "wrote page.html\n"
    assert "<h1>runs/a</h1>" in Path("page.html").read_text()
    result = CliRunner().invoke(ditask, ["report", "none"])
    assert result.exit_code == 1 and "found no run in none" in result.output
