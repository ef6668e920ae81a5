"""The page in a real browser, where there is one: the switch works without scripts, nothing overflows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest

from report.test_page import TOLD, point
from shearling.report.page import sweep_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=4000", "--dump-dom",
)  # fmt: skip
# Looks at the page inside frames of two widths; the page itself runs no script.
LOOK = """
<script>addEventListener('load', () => {
  const seen = [...document.querySelectorAll('iframe')].map(frame => {
    const page = frame.contentDocument, root = page.documentElement
    const shown = () => [...page.querySelectorAll('.axis')].map(a => getComputedStyle(a).display != 'none')
    const first = shown(), text = page.querySelector('.axis svg text').getBoundingClientRect().height
    page.querySelector('#axis2').click()
    return {overflow: root.scrollWidth - root.clientWidth, first, second: shown(), text}
  })
  document.body.textContent = 'SEEN' + JSON.stringify(seen) + 'END'
})</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
def test_at_the_width_of_a_phone_and_of_a_screen(tmp_path: Path) -> None:
    more = {"timing": {"measured": 0.5, "device": "a device"}, "megabytes": 40.0}
    results = [point(method, flops, 89.0, **more) for method in ("surgeon", "paper") for flops in (0.9, 0.7, 0.5, 0.3)]
    page = escape(sweep_page(results, TOLD, title="a-model-with-quite-a-long-name-of-its-own: sst2"))
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{page}"></iframe>' for width in (390, 1400))
    (tmp_path / "look.html").write_text(f"<!doctype html><body>{frames}{LOOK}", encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'look.html'}"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.search("SEEN(.*)END", said)
    assert found, said[-500:]
    for seen in json.loads(found[1]):
        assert seen["overflow"] <= 0
        assert seen["first"] == [True, False, False]
        assert seen["second"] == [False, True, False]
        assert seen["text"] >= 10  # pixels
