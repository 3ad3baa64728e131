"""Every Python block in the documentation runs."""

import ast
import json
import re
import runpy
import shlex
import textwrap
from pathlib import Path

import pytest
import typer.main

import dpa
from dpa.cli import app

_ROOT = Path(__file__).parent.parent
_PAGES = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *sorted(_ROOT.glob("docs/**/*.md"))]


def _blocks():
    for page in _PAGES:
        for i, code in enumerate(
            re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
        ):
            yield pytest.param(code, id=f"{page.relative_to(_ROOT)}-{i}")


@pytest.mark.parametrize("code", _blocks())
def test_block_runs(code, tmp_path, monkeypatch):
    pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "block", "exec"), {"__name__": "block"})


def _outside_fences(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


@pytest.mark.parametrize(
    "page", [p for p in _PAGES if p.parent.name != "reference"], ids=lambda p: p.name
)
def test_nothing_else_is_shown_unchecked(page):
    """Fences are Python, which runs, commands or quotations; indented lines name what exists."""
    languages = set(re.findall(r"^```(\w+)", page.read_text(), re.M))
    assert languages <= {"python", "sh"} or page.name == "own-op.md", (
        languages
    )  # see test_own_op.py
    makefile = (_ROOT / "Makefile").read_text()
    for block in re.findall(r"(?:^    \S.*\n)+", _outside_fences(page), re.M):
        code = textwrap.dedent(block)
        if code.startswith("make "):
            for target in re.findall(r"^make (\w+)", code, re.M):
                assert re.search(rf"^{target}:", makefile, re.M), target
            continue
        if code.startswith(("pip ", "dpa ", "python ", "torchrun ")):
            continue  # dpa's own are parsed below
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "dpa":
                assert hasattr(dpa, node.attr), node.attr


def test_commands_exist():
    commands = {c.name or c.callback.__name__ for c in app.registered_commands}
    for page in _PAGES:
        for name in re.findall(r"`dpa (\w+)", page.read_text()):
            assert name in commands, f"{page.name}: dpa {name}"


def test_links_lead_somewhere():
    for page in _PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", _outside_fences(page)):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def _commands():
    for page in _PAGES:
        fences = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S)
        indented = re.findall(r"(?:^    \S.*\n)+", _outside_fences(page), re.M)
        for block in fences + indented:
            for line in textwrap.dedent(block).splitlines():
                if line.startswith("dpa "):
                    yield pytest.param(line, id=f"{page.stem}: {line.partition('#')[0].strip()}")


@pytest.mark.parametrize("line", list(_commands()))
def test_commands_have_the_options_that_the_pages_use(line):
    _, name, *words = shlex.split(line, comments=True)
    command = typer.main.get_command(app).commands[name]
    with command.make_context(name, words, resilient_parsing=False):
        pass


def test_charts_are_drawn_from_the_figures():
    figures = runpy.run_path(str(_ROOT / "docs/figures.py"))
    for name, figure in json.loads((_ROOT / "docs/figures.json").read_text()).items():
        drawn = (_ROOT / f"docs/images/{name}.svg").read_text()
        assert drawn == figures["chart"](**figure), f"run docs/figures.py: {name}"
