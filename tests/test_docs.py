"""The documentation says what the program does: its code runs, its names exist, its links lead somewhere."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import BertForSequenceClassification

import shearling
from data.tiny import bert_config, bert_tokenizer, build
from families import slow
from shearling.cli import run
from shearling.methods import METHODS
from shearling.models import table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
PAGES = sorted(path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")) if path.exists())
FENCE = re.compile(r"(?:<!-- needs: ([\w, -]+) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WORDS = ("good", "bad", "film", "city", "river", "paris", "anna", "walk")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    code: str
    needs: str | None
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[2], m[3], m[1], text[: m.start()].count("\n") + 1) for m in FENCE.finditer(text)]


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command of a bash block; comments and continued lines as the shell has them."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def is_at_hand(needs: str | None) -> bool:
    """Whether a block can run here: no network and no GPU in tests, other needs are packages."""
    names = [name.strip() for name in needs.split(",")] if needs else []
    return all(name not in ("network", "gpu", "processes") and importlib.util.find_spec(name) for name in names)


@pytest.fixture(autouse=True)
def same_rows_and_methods() -> Iterator[None]:
    """Pages that add a toy architecture or method leave none behind."""
    rows, methods = list(table.ROWS), dict(METHODS)
    yield
    table.ROWS[:] = rows
    METHODS.clear()
    METHODS.update(methods)


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folder with `my-model` and `reviews.jsonl`, and the names that the pages take for granted."""
    monkeypatch.chdir(tmp_path)
    tokenizer = bert_tokenizer()
    model = build(BertForSequenceClassification, bert_config())
    model.save_pretrained("my-model")
    tokenizer.save_pretrained("my-model")
    rows = [{"text": f"the {WORDS[i % 8]} film was {WORDS[i // 8 % 8]} .", "label": i % 2} for i in range(80)]
    Path("reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    texts = [row["text"] for row in rows]
    batches = [dict(tokenizer(texts[i : i + 16], padding=True, return_tensors="pt")) for i in range(0, 80, 16)]
    return {"model": model, "tokenizer": tokenizer, "batches": batches}


@pytest.mark.parametrize("page", [slow(p) if p.name == "constraints.md" else p for p in PAGES], ids=lambda p: p.name)
def test_every_block_of_a_page_runs(page: Path, workshop: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    work_through(page, [block for block in blocks_of(page) if block.needs is None], workshop, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if "<!-- needs: onnx" in p.read_text("utf-8")], ids=lambda p: p.name)
def test_blocks_with_optional_packages_run(
    page: Path, workshop: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    work_through(page, [block for block in blocks_of(page) if is_at_hand(block.needs)], workshop, capfd)


def work_through(page: Path, blocks: list[Block], names: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            where = f"{page.name}, line {block.line}"
            if block.language == "python":
                exec(compile(block.code, where, "exec"), names)
            for words in commands_of(block) if block.language == "bash" else ():
                assert words[0] == "shearling", f"{where}: mark blocks that run anything else with <!-- needs: ... -->"
                code = run(words[1:])
                assert code == 0, f"{where}: {shlex.join(words)} exits with {code}: {capfd.readouterr().err}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_its_language(page: Path) -> None:
    nameless = [block.line for block in blocks_of(page) if not block.language]
    assert not nameless, f"{page.name}: blocks without a language at lines {nameless}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if not t.startswith(("http", "#"))]
    gone = [t for t in targets if not (page.parent / t).exists()]
    assert not gone, f"{page.name} links to {gone}"


def test_the_first_screen_of_the_readme() -> None:
    """One sentence, the picture, three rows, how to install, one command and its output, a few lines of Python."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start, end = text.index("<!-- headline:start -->"), text.index("<!-- headline:end -->")
    assert text.index("docs/images/headline.svg") < start < end
    assert len([line for line in text[start:end].splitlines() if line.startswith("|")]) == 2 + 3
    install, command, output, python = blocks_of(ROOT / "README.md")[:4]
    assert [b.language for b in (install, command, output, python)] == ["bash", "bash", "text", "python"]
    assert len(list(commands_of(install))) == len(list(commands_of(command))) == 1
    assert len([line for line in python.code.splitlines() if line.strip()]) <= 6
    assert "make demo" in text
    assert "make test" in text


def test_the_first_screen_shows_the_kept_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the README and its picture are those that `experiments/headline.py` makes."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    headline = importlib.import_module("headline")
    scores = headline.read(headline.BENCHMARKS / "accuracy.json")["rows"]
    sizes = headline.read(headline.EXPERIMENTS / "sizes.json")["rows"]
    assert headline.three_rows(scores, sizes) in (ROOT / "README.md").read_text(encoding="utf-8")
    drawn, kept = (
        re.findall(r">([^<>]+)</text>", svg) for svg in (headline.picture(scores), headline.PICTURE.read_text())
    )
    assert drawn == kept


def environment(**more: str) -> dict[str, str]:
    """For subprocesses that use the same shearling as this one."""
    path = os.pathsep.join([str(Path(shearling.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def in_processes(words: list[str]) -> subprocess.CompletedProcess[str]:
    """A command with `torchrun` or `accelerate` in front, run by this Python."""
    launchers = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
    command, home = [sys.executable, "-m", launchers[words[0]], *words[1:]], environment(GLOO_SOCKET_IFNAME="lo")
    return subprocess.run(command, env=home, capture_output=True, text=True, check=False, timeout=500)


@pytest.mark.slow
def test_commands_for_several_processes_run_in_two(workshop: dict[str, Any]) -> None:
    blocks = [block for block in blocks_of(DOCS / "several-gpus.md") if block.needs == "processes"]
    for block in blocks:
        if block.language == "python":
            Path(block.code.splitlines()[0].removeprefix("# ")).write_text(block.code, encoding="utf-8")
        for words in commands_of(block) if block.language == "bash" else ():
            done = in_processes(words)
            assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr[-2000:]}"
    sizes = [json.loads(path.read_text("utf-8"))["layers"] for path in Path().glob("my-model-*/shearling.json")]
    assert len(sizes) == 3
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its cells as one script; what they write is there afterwards."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "clear the outputs of the notebook before committing it"
    script = tmp_path / "quickstart.py"
    script.write_text("\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code"), encoding="utf-8")
    home = environment(HF_HUB_OFFLINE="1", MPLBACKEND="agg")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=home, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    dense, pruned = map(float, re.findall(r"^dense ([\d.]+), pruned ([\d.]+)$", done.stdout, re.MULTILINE)[0])
    assert dense > 80
    assert pruned > dense - 5
    assert all(
        (tmp_path / name).exists() for name in ("curve.png", "tiny-model-50/tokenizer.json", "tiny-model-50.pt2")
    )


def test_the_tree_names_what_there_is() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = next(block.code for block in blocks_of(ROOT / "CONTRIBUTING.md") if block.code.startswith("src/shearling/"))
    named = re.findall(r"^  ([\w.]+/?)\s", tree, re.MULTILINE)
    package = ROOT / "src" / "shearling"
    assert all((package / name).exists() for name in named), text
    folders = {p.name for p in package.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert folders <= {name.rstrip("/") for name in named}, "a folder of the package is not in the tree"


PRUNE = "prune my-model --data reviews.jsonl --quiet"
PROFILE = "profile my-model --batch-size 4 --seq-len 8 --seconds 1 --out table.json --quiet"
WALKS = {  # by the first function of their list
    "cli.prune.prune": f"{PRUNE} --flops 0.5 --out small",
    "target.Target.checked": f"{PRUNE} --latency 0.9 --table table.json --out fast",
    "cli.sweep.sweep": "sweep my-model --data reviews.jsonl --eval reviews.jsonl --flops 0.5 --out curve --quiet",
}


def test_the_walks_name_the_functions_that_are_called(workshop: dict[str, Any]) -> None:
    """CONTRIBUTING.md lists the functions on the way of three commands: in the order of their calls, none left out."""
    assert run(shlex.split(PROFILE)) == 0
    lists = [block.code.split("\n") for block in blocks_of(ROOT / "CONTRIBUTING.md") if block.language == "text"]
    walks = [list(steps_of(lines)) for lines in lists if lines[0].split()[0] in WALKS]
    assert len(walks) == len(WALKS)
    for walk in walks:
        command = WALKS[walk[0][0]]
        called = iter(called_by(command.split()))
        # `in` moves on: the order counts. The first lines of a list do not say who calls them.
        missing = [step for step in walk if not any(step[0] == name and step[1] in (None, by) for name, by in called)]
        assert not missing, f"{missing[0]} is not called so, or not at that place, by: shearling {command}"


def steps_of(lines: list[str]) -> Iterator[tuple[str, str | None]]:
    """(function, the one that calls it): the nearest line above that is indented less."""
    above: list[tuple[int, str]] = []
    for line in filter(None, lines):
        name, depth = line.split()[0], len(line) - len(line.lstrip())
        above = [(indent, caller) for indent, caller in above if indent < depth]
        yield name, above[-1][1] if above else None
        above.append((depth, name))


def called_by(words: list[str]) -> list[tuple[str, str | None]]:
    """The functions of the package that a command calls, each with its caller, in the order of these calls.

    A function inside another one counts as part of it.
    """
    package = str(Path(shearling.__file__).parent)
    found: dict[tuple[str, str | None], None] = {}

    def name_of(frame: Any) -> str | None:
        code = frame.f_code
        if not code.co_filename.startswith(package) or code.co_flags & inspect.CO_NESTED:
            return None
        module = Path(code.co_filename).relative_to(package).with_suffix("")
        owner = type(frame.f_locals["self"]).__name__ + "." if "self" in frame.f_locals else ""
        return ".".join(module.parts) + f".{owner}{code.co_name}"

    def see(frame: Any, event: str, _: object) -> None:
        if event == "call" and (name := name_of(frame)) is not None:
            caller = frame.f_back
            while caller is not None and name_of(caller) is None:
                caller = caller.f_back
            found.setdefault((name, None if caller is None else name_of(caller)))

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        assert run(words) == 0
    finally:
        sys.setprofile(before)
    return list(found)


def test_the_functions_that_the_methods_page_names_exist() -> None:
    text = (DOCS / "method.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(shearling(?:\.\w+)+)`", text))
    assert len(names) >= 15
    for name in names:
        home, _, attribute = name.rpartition(".")
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError:
            owner, _, inner = home.rpartition(".")
            found = getattr(_module_or_class(home, owner, inner), attribute)
        assert found is not None


def _module_or_class(home: str, owner: str, inner: str) -> Any:
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(owner), inner)


def test_the_python_reference_is_complete() -> None:
    shown = set(re.findall(r"^::: shearling\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE))
    missing = set(shearling.__all__) - shown - {"__version__"}
    assert not missing, f"docs/api.md does not show {sorted(missing)}"


def test_deviations_named_in_the_code_are_on_the_methods_page() -> None:
    """Every module that says `Differs from the paper` stands in the table of deviations."""
    text = (DOCS / "method.md").read_text(encoding="utf-8")
    table = text.partition("## Where this differs from the paper, and why")[2]
    source = ROOT / "src"
    marked = [p for p in source.rglob("*.py") if "Differs from the paper" in p.read_text(encoding="utf-8")]
    modules = [".".join(p.relative_to(source).with_suffix("").parts) for p in marked]
    assert modules, "the code marks its deviations with `Differs from the paper`"
    missing = [module for module in modules if f"`{module}`" not in table]
    assert not missing, f"docs/method.md does not say how {missing} differ from the paper"


def test_the_command_reference_shows_every_command_and_option(monkeypatch: pytest.MonkeyPatch) -> None:
    typer = pytest.importorskip("typer")
    from shearling.cli.app import app

    monkeypatch.syspath_prepend(str(DOCS))
    reference = importlib.import_module("hooks").commands()
    root = typer.main.get_command(app)
    for name, command in root.commands.items():
        assert f"## shearling {name}\n" in reference
        for parameter in command.params:
            shown = not getattr(parameter, "hidden", False)  # the old name of another option
            assert all((f"`{o}`" in reference) is shown for o in parameter.opts if o.startswith("-"))
    assert "| `--seed` |" in reference


def test_docstrings_become_lists_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(str(DOCS))
    text = (
        "One line.\n\ndata, more  what it is,\n            and on\nseed        a number\n\n>>> f(1)  # doctest: +SKIP"
    )
    shown = importlib.import_module("docstrings").as_markdown(text)
    assert "* `data`, `more`: what it is, and on\n* `seed`: a number" in shown
    assert "```python\nf(1)\n```" in shown


@pytest.mark.slow  # `make check` builds it too
def test_the_site_builds_and_asks_nothing_of_other_hosts(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    site = tmp_path / "site"
    arguments = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml")]
    home = environment(NO_MKDOCS_2_WARNING="1")
    done = subprocess.run(
        [*arguments, "-d", str(site)], cwd=ROOT, env=home, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*', text), page.name
        assert "arithmatex" not in text, f"{page.name} has a formula that was not drawn"
    assert "<math" in (site / "method.html").read_text(encoding="utf-8")
