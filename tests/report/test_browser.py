"""The page in a real browser, where there is one: the switch works without scripts, nothing overflows or is fetched."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import pytest

import shearling
from report.test_page import FLIPPED, TOLD, point
from shearling.report.page import compare_page, model_page, sweep_page
from tiny import batches_of, model_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=4000", "--dump-dom",
)  # fmt: skip
# Looks at pages inside frames; the pages themselves run no script.
LOOK = """
<script>addEventListener('load', () => {
  const seen = [...document.querySelectorAll('iframe')].map(frame => {
    const page = frame.contentDocument, root = page.documentElement
    const shown = () => [...page.querySelectorAll('.axis')].map(a => getComputedStyle(a).display != 'none')
    const first = shown(), chart = page.querySelector('.axis svg text'), other = page.querySelector('#axis2')
    const text = chart ? chart.getBoundingClientRect().height : null
    if (other) other.click()
    return {
      overflow: root.scrollWidth - root.clientWidth, first, second: shown(),
      text,
      fetched: frame.contentWindow.performance.getEntriesByType('resource').length,
      ground: getComputedStyle(page.body).backgroundColor, ink: getComputedStyle(page.body).color,
    }
  })
  document.body.textContent = 'SEEN' + JSON.stringify(seen) + 'END'
})</script>
"""
WIDTHS = (390, 1400)
DARK = "--blink-settings=preferredColorScheme=0"


def looked_at(page: str, place: Path, *flags: str) -> list[dict[str, Any]]:
    """What a browser makes of a page, at the width of a phone and of a screen."""
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{escape(page)}"></iframe>' for width in WIDTHS)
    (place / "look.html").write_text(f"<!doctype html><body>{frames}{LOOK}", encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, *flags, f"--user-data-dir={place / 'profile'}", f"file://{place / 'look.html'}"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.search("SEEN(.*)END", said)
    assert found, said[-500:]
    seen: list[dict[str, Any]] = json.loads(found[1])
    for one in seen:
        assert one["overflow"] <= 0
        assert one["fetched"] == 0
    return seen


def bright(colour: str) -> float:
    """Of `rgb(12, 17, 21)`, from 0 to 255."""
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """One model with all that a page can show of it."""
    tried = [
        {"budget": 0.2, "value": 80.0, "drop": 10.0, "allowed": False, "note": ""},
        {"budget": 0.5, "value": 89.5, "drop": 0.5, "allowed": True, "note": ""},
    ]
    drop = {"allowed": 1.0, "by": "flops", "metric": "accuracy", "dense": 90.0, "value": 89.5, "drop": 0.5,
            "examples": 100, "tried": tried}  # fmt: skip
    text = "a rather long text with averylongwordthatdoesnotwantto" + "break" * 30
    changed = FLIPPED | {"shown": [{"text": text, "right": "good", "dense": "good", "pruned": "bad"}]}
    made = shearling.prune(model_of("bert"), batches_of(4, 8), flops=0.5, progress=False).report.to_json()
    return made | {"max_drop": drop, "flipped": changed, "command": "shearling prune " + "a-long-name" * 20}


def test_a_sweep(tmp_path: Path) -> None:
    more = {"timing": {"measured": 0.5, "device": "a device"}, "megabytes": 40.0, "flipped": FLIPPED}
    results = [point(method, flops, 89.0, **more) for method in ("surgeon", "paper") for flops in (0.9, 0.7, 0.5, 0.3)]
    page = sweep_page(results, TOLD, title="a-model-with-quite-a-long-name-of-its-own: sst2")
    for seen in looked_at(page, tmp_path):
        assert seen["first"] == [True, False, False]
        assert seen["second"] == [False, True, False]
        assert seen["text"] >= 10  # pixels
        assert bright(seen["ground"]) > 200 > 60 > bright(seen["ink"])


def test_a_model_by_day_and_by_night(record: dict[str, Any], tmp_path: Path) -> None:
    for seen in looked_at(model_page(record), tmp_path):
        assert seen["first"] == seen["second"] == [True]  # one chart, nothing to switch
        assert bright(seen["ground"]) > 200 > 60 > bright(seen["ink"])
    for seen in looked_at(model_page(record), tmp_path, DARK):
        assert bright(seen["ground"]) < 60 < 200 < bright(seen["ink"])


def test_two_models(tmp_path: Path) -> None:
    side = {"model": "a" * 40, "value": 90.0, "em": None, "bytes": 1e6, "params": 250_000, "macs": 1e9,
            "milliseconds": 2.0}  # fmt: skip
    found = {"task": "sst2", "metric": "accuracy", "examples": 10, "agreement": None, "batch": [1, 8],
             "device": "a CPU", "models": [side, side | {"model": "b" * 40}], "flipped": FLIPPED}  # fmt: skip
    looked_at(compare_page(found), tmp_path)
