"""Every Python block in the documentation runs."""

import ast
import json
import re
import runpy
import shlex
import textwrap
from pathlib import Path

import pytest
import torch.distributed.run
import typer.main

import dpa
from dpa.cli.app import app

_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *sorted(_ROOT.glob("docs/**/*.md"))]


_BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n\nprints\n\n```\n(.*?)^```)?", re.M | re.S)


def _blocks():
    """Each Python block, and what its page says that it prints."""
    for page in _PAGES:
        for i, (code, printed) in enumerate(_BLOCK.findall(page.read_text())):
            yield pytest.param(code, printed, id=f"{page.relative_to(_ROOT)}-{i}")


@pytest.mark.parametrize(("code", "printed"), _blocks())
def test_block_runs(code, printed, tmp_path, monkeypatch, capsys):
    pytest.importorskip("diffusers")
    if "from lerobot" in code:
        name = "lerobot.policies.diffusion.modeling_diffusion"
        pytest.importorskip(name, exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "block", "exec"), {"__name__": "block"})
    if printed:  # errors differ from run to run
        said = [re.sub(r"error \S+", "error", text) for text in (capsys.readouterr().out, printed)]
        assert said[0] == said[1]


def _messages(path):
    """The strings of a Python file, a line each, without what f-strings fill in."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
            yield "".join(parts)


def test_messages_that_troubleshooting_explains_are_those_of_the_code():
    said = "\n".join(s for path in (_ROOT / "python").rglob("*.py") for s in _messages(path))
    page = (_ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"\*\*`([^`]+)`\*\*", page)
    assert len(messages) > 20
    for message in messages:
        for part in re.split(r"\.\.\.| must |, got ", message):
            assert part.strip(" ,:()") in said, message


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


def test_help_is_broken_by_the_terminal_alone():
    for command in app.registered_commands:
        paragraphs = command.help.split("\n\n")
        assert "Examples:" in paragraphs and not any("\n" in p for p in paragraphs), command.help
        assert max(len(p) for p in paragraphs if p.startswith(" ")) <= 78, command.help


def test_links_lead_somewhere():
    for page in _PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", _outside_fences(page)):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def _commands(*programs):
    """Lines of the pages that call one of ``programs``, in blocks and between backticks."""
    for page in _PAGES:
        fences = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S)
        outside = _outside_fences(page)
        indented = re.findall(r"(?:^    \S.*\n)+", outside, re.M)
        for block in [*fences, *indented, *re.findall(r"`([^`\n]+)`", outside)]:
            for line in textwrap.dedent(block).splitlines():
                if line.startswith(programs):
                    yield pytest.param(line, id=f"{page.stem}: {line.partition('#')[0].strip()}")


def _parse(name, *words):
    group = typer.main.get_command(app)
    if name.startswith("-"):
        assert any(name in option.opts for option in group.params), name
        return
    command = group.commands[name]
    try:
        with command.make_context(name, list(words)):
            pass
    except Exception as error:  # a sentence may leave out what the command needs
        if type(error).__name__ != "MissingParameter":
            raise


@pytest.mark.parametrize("line", list(_commands("dpa ")))
def test_commands_have_the_options_that_the_pages_use(line):
    _parse(*shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("line", list(_commands("torchrun ", "python ")))
def test_launchers_have_the_options_that_the_pages_use(line):
    """What they launch is dpa, or a script of a page, which other tests run."""
    launcher, *words = shlex.split(line, comments=True)
    if launcher == "torchrun":
        arguments = torch.distributed.run.get_args_parser().parse_args(words)
        words = ["-m"] * arguments.module + [arguments.training_script]
        words += arguments.training_script_args
    if words[:2] == ["-m", "dpa"]:
        _parse(*words[2:])
    elif words == ["train.py"]:
        assert "```python" in (_ROOT / "docs/training.md").read_text()
    else:
        text = (_ROOT / words[0]).read_text()
        assert all(f'"{word}"' in text for word in words if word.startswith("--"))


@pytest.mark.parametrize("line", list(_commands("pip ")))
def test_packages_to_install_are_ones_that_are_tested(line):
    pins = "".join(path.read_text() for path in _ROOT.glob("requirements/*.txt"))
    command, *words = shlex.split(line, comments=True)[1:]
    assert command == "install"
    if words[0] == "-r":
        assert (_ROOT / words[1]).exists() and len(words) == 2, line
        return
    for word in words:
        name = re.split(r"[<=>]", word)[0]
        ours = name in ("dist/torch_dpa-*.whl", "--no-build-isolation", ".", "./plugins/lerobot")
        assert ours or re.search(rf"^{name}==", pins, re.M), name


def test_pages_name_the_figures_of_the_charts():
    """Whoever measures anew changes one file, and this names the sentences that are left."""
    chart = json.loads((_ROOT / "docs/figures.json").read_text())["step-gpu"]
    figures = {label: f"{value:g}" for label, value, _ in chart["rows"]}
    ways = ("PyTorch eager", "torch.compile", "dpa")
    float32, bfloat16 = ([figures[f"{t}, {way}"] for way in ways] for t in ("float32", "bfloat16"))
    eager, compiled, ours = zip(float32, bfloat16, strict=True)
    said = {
        "README.md": [" | ".join(float32), " | ".join(bfloat16)],
        "docs/comparison.md": [f"| {a} | {b} |" for a, b in (eager, compiled, ours)],
        "docs/benchmarks.md": [f"torch.compile ({us} us)" for us in compiled],
        "docs/reference/measured.json": [
            f"{ours[0]} us in float32, {ours[1]} in bfloat16",
            f"takes {eager[0]} in float32 and {eager[1]} in bfloat16",
        ],
    }
    for page, sentences in said.items():
        text = (_ROOT / page).read_text()
        assert [words for words in sentences if words not in text] == [], page


def test_charts_are_drawn_from_the_figures():
    figures = runpy.run_path(str(_ROOT / "docs/figures.py"))
    for name, figure in json.loads((_ROOT / "docs/figures.json").read_text()).items():
        drawn = (_ROOT / f"docs/images/{name}.svg").read_text()
        assert drawn == figures["chart"](**figure), f"run docs/figures.py: {name}"
