"""One self-contained HTML file: no script, no font, no picture from elsewhere; light and dark as the reader has it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shearling._version import __version__
from shearling.report.chart import style

CSS = """
*{box-sizing:border-box}
:root{color-scheme:light dark;--page:#f4f6f8;--edge:#dfe5ea;--good:#1d7f5c;--poor:#9a6a00;--bad:#b3315f}
@media (prefers-color-scheme:dark){:root{--page:#0c1115;--edge:#26323c;--good:#4fd0a1;--poor:#ecc04c;--bad:#ff85ac}}
body{margin:0;background:var(--page);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}
main{max-width:960px;margin:0 auto;padding:36px 20px 60px}
h1{font-size:27px;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 12px}
h3{font-size:14px;margin:18px 0 8px;color:var(--soft);font-weight:600}
.under{color:var(--soft);margin:0 0 24px}
section{background:var(--ground);border:1px solid var(--edge);border-radius:10px;padding:20px 22px;margin:0 0 18px}
.hint{color:var(--soft);margin:-6px 0 14px;font-size:14px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:14px;margin:0 0 18px}
.card{background:var(--ground);border:1px solid var(--edge);border-radius:10px;padding:14px 18px}
.what,.below{color:var(--soft);font-size:13px}
.number{font-size:27px;font-weight:650;letter-spacing:-.01em;margin:2px 0;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;color:var(--soft);padding:6px 10px 6px 0;border-bottom:1px solid var(--edge)}
td{padding:6px 10px 6px 0;border-bottom:1px solid var(--edge)}
tbody tr:last-child td,tbody tr:last-child th{border-bottom:0}
.n{text-align:right}
.good{color:var(--good)}.poor{color:var(--poor)}.bad{color:var(--bad)}
.heat{width:auto;min-width:60%}
.heat th{text-align:center;padding:3px 8px;border:0;font-size:13px}
.heat .group{padding-bottom:2px}
.heat td{text-align:center;padding:5px 7px;min-width:46px;border:2px solid var(--ground);border-radius:5px;
 font-size:13px;background:color-mix(in srgb,var(--s0) calc(var(--share)*.62),var(--page))}
.bars th{width:1%;padding-right:18px}
.bars th+th{width:50%}
.bar{height:12px;background:var(--page);border-radius:6px;overflow:hidden;display:inline-block;width:58%;
 vertical-align:middle}
.bar i{display:block;height:100%;background:var(--s0)}.bar.filters i{background:var(--s2)}
.count{color:var(--soft);font-size:13px;margin-left:10px;white-space:nowrap}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--soft);margin-bottom:10px}
.key i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.time{display:grid;grid-template-columns:minmax(110px,22%) 1fr 74px;align-items:center;gap:12px;margin:5px 0;
 font-size:14px}
.stack{display:flex;height:16px;border-radius:4px;overflow:hidden;background:var(--page)}
.stack i{display:block;min-width:1px}
.sum{text-align:right;color:var(--soft);font-variant-numeric:tabular-nums}
pre{background:var(--page);border-radius:8px;padding:14px 16px;overflow-x:auto;margin:0 0 8px;font-size:13px}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;overflow-wrap:anywhere}
td code{font-size:13px}
ul{margin:0;padding-left:20px}
footer{color:var(--soft);font-size:13px;text-align:center}
svg.chart{width:100%;height:auto;display:block}
@media print{section,.card{break-inside:avoid}}
"""


def page(title: str, under: str, body: Sequence[str]) -> str:
    """The file around the sections."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{style()}{CSS}</style></head>'
        f'<body><main><h1>{escape(title)}</h1><p class="under">{escape(under)}</p>{"".join(body)}'
        f"<footer>made by shearling {escape(__version__)}</footer></main></body></html>\n"
    )


def snippet(directory: str, architecture: str | None = None) -> str:
    """How to load a pruned model: ours, and the way people know."""
    ours = f'import shearling\n\nmodel = shearling.load("{directory}")'
    if architecture is None:
        return ours
    known = f'from transformers import {architecture}\n\nmodel = {architecture}.from_pretrained("{directory}")'
    return f"{ours}\n\n# or, after `import shearling`, like any other model\n{known}"
