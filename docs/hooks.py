"""What the site adds while it is built: the command reference, the measured tables, and formulas without scripts.

<!-- commands -->             every command with its options, from the program itself
<!-- include: headline -->    the block between <!-- headline:start --> and <!-- headline:end --> of README.md
$...$ and $$...$$             MathML, which browsers draw on their own
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r"<!-- include: (\w+) -->")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page before it is rendered."""
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", commands())
    return INCLUDE.sub(lambda match: block(match[1]), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs for every page after it is rendered."""
    return FORMULA.sub(_formula, content)


def block(name: str) -> str:
    """A named block of README.md."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name}:start -->(.*?)<!-- {name}:end -->", readme, re.DOTALL)
    if found is None:
        raise ValueError(f"README.md has no block '{name}' between <!-- {name}:start --> and <!-- {name}:end -->.")
    return found[1].strip()


def commands() -> str:
    """The reference of the command line, from the commands themselves."""
    import typer

    from shearling.cli.app import app

    root = typer.main.get_command(app)
    parts = []
    for name, command in sorted(root.commands.items()):  # type: ignore[attr-defined]
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context)).replace("{", "").replace("}", "")
        lines = [
            f"## shearling {name}",
            "",
            (command.help or "").strip(),
            "",
            "```text",
            f"shearling {name} {usage}",
            "```",
            "",
        ]
        lines += ["| option | what it does | default |", "|---|---|---|"]
        lines += [_row(parameter, context) for parameter in command.params if not getattr(parameter, "hidden", False)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _row(parameter: Any, context: Any) -> str:
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.name.upper()]
    default = parameter.get_default(context)
    shown = "" if default is None or default is False or parameter.required else f"`{default}`"
    text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    return f"| {', '.join(f'`{name}`' for name in names)} | {text} | {shown} |"


def _formula(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    display = match[1] == "div"
    mathml = convert(html.unescape(match[2]).strip(), display="block" if display else "inline")
    return f'<div class="formula">{mathml}</div>' if display else mathml
