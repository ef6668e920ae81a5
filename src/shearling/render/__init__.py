"""Pictures and pages: a chart as SVG, a report as one self-contained HTML file; no plotting library needed.

chart.py   lines, bands and reference levels -> SVG
curve.py   the results of a sweep -> its chart
parts.py   the sections of a page
page.py    sections -> one HTML file, light and dark

model_page.py, sweep_page.py   which sections a page has
"""

from shearling.render.chart import Level, Point, Series, chart
from shearling.render.curve import curve_chart
from shearling.render.model_page import report_page
from shearling.render.sweep_page import sweep_page

__all__ = ["Level", "Point", "Series", "chart", "curve_chart", "report_page", "sweep_page"]
