"""Docstrings as the site shows them: a column of names with their meanings becomes a list, doctests become code.

The source keeps them as they are best read there:

    data     a re-iterable of batches
    watcher  called as the work goes on
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^(\w[\w, ]*?) {2,}(\S.*)$")
MORE = re.compile(r"^ {4,}(\S.*)$")


class Docstrings(griffe.Extension):
    """Rewrites every docstring once it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for every module, class and function."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring of this project as Markdown."""
    lines: list[str] = []
    inside = False  # a list of names
    for line in text.splitlines():
        entry, more = ENTRY.match(line), MORE.match(line)
        if entry:
            lines += [] if inside else [""]
            lines.append(f"* {', '.join(f'`{name.strip()}`' for name in entry[1].split(','))}: {entry[2]}")
        elif inside and more:
            lines[-1] += f" {more[1]}"
        elif line.startswith(">>> "):
            lines += ["```python", line[4:].replace("  # doctest: +SKIP", ""), "```"]
        else:
            lines.append(line)
        inside = bool(entry or (inside and more))
    return "\n".join(lines)
