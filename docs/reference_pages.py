"""The reference: a page an op, made from its schema, its docstring and the files of its stem.

A hook of MkDocs, which also shows the pages that lie beside the README. Nothing is written down
twice: the schema is read from ops/library.cpp, the errors from the test that provokes them, the
rest of a page is the docstring of ``dpa.ops`` and, where it was measured, what
docs/reference/measured.json says of its speed. The page of the command line ends with what
``--help`` prints.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parent.parent
_KEYS = ("CPU", "CUDA", "Meta", "Autograd", "Autocast")
# Two ops whose code is one stem, and what their tests' file is called.
_FOLDERS = {"diffusion_sample": "unet1d"}
_TESTS = {"unet1d": "packed", "diffusion_sample": "packed"}
# Pages outside of docs/.
_BESIDE_README = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def _schemas() -> dict[str, list[str]]:
    """Every schema of the library by its op's name, overloads together."""
    text = re.sub(r'"\s*\n\s*"', "", (_ROOT / "ops/library.cpp").read_text())
    schemas: dict[str, list[str]] = {}
    for schema in re.findall(r'"(\w+(?:\.\w+)?\([^"]*\) -> [^"]*)"', text):
        # Infinity, which the schema language cannot spell, is set after parsing.
        schema = schema.replace("float clip=0", "float clip=inf")
        schemas.setdefault(re.split(r"[.(]", schema)[0], []).append(schema)
    return schemas


def _wrappers() -> dict[str, str]:
    """The first line of each public wrapper's docstring by the op's name."""
    schemas = _schemas()
    trees = [ast.parse(path.read_text()) for path in (_ROOT / "python/dpa/ops").glob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    functions = [f for f in functions if f.name in schemas]
    return {f.name: (ast.get_docstring(f) or "").partition("\n")[0] for f in functions}


def _rules() -> str:
    """What holds for every op: the second paragraph of the docstring of ``dpa.ops``."""
    text = ast.get_docstring(ast.parse((_ROOT / "python/dpa/ops/__init__.py").read_text())) or ""
    return re.sub(r":\w+:`([^`]*)`", r"`\1`", text.split("\n\n")[1]).replace("``", "`")


def _mapped() -> set[str]:
    """The ops that have a rule for torch.vmap."""
    tree = ast.parse((_ROOT / "python/dpa/ops/batching.py").read_text())
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    return {key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)}


def _errors(name: str) -> list[str]:
    """What the op's test has it refuse, each as the message that the test expects."""
    tree = ast.parse(_test(name).read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    found = []
    for function in [f for f in functions if f.name in ("rejected", f"rejected_{name}")][:1]:
        for node in ast.walk(function):
            # yield head + r"<regular expression>", Sample(...)
            regex = getattr(getattr(node, "right", None), "value", None)
            if isinstance(node, ast.BinOp) and isinstance(regex, str):
                text = re.sub(r"\.\*", " ... ", regex)
                found.append(re.sub(r"\\(.)", r"\1", re.sub(r" +", " ", text)))
    found = list(dict.fromkeys(found))
    # Without the cases whose message another case gives in full; cut ones are marked.
    found = [one for one in found if sum(other.startswith(one) for other in found) == 1]
    return [one if " got " in one else f"{one} ..." for one in found]


def _test(name: str) -> Path:
    """The file that tests an op."""
    (path,) = _ROOT.glob(f"test/*/test_{_TESTS.get(name, name)}.py")
    return path


def _stem_files(name: str) -> list[str]:
    name = _FOLDERS.get(name, name)
    folders = [_ROOT / folder / name for folder in ("ops", "kernels/cuda", "kernels/plans")]
    files = [path for folder in folders for path in sorted(folder.glob("*")) if path.is_file()]
    files.append(_test(name))
    return [str(path.relative_to(_ROOT)) for path in files]


def _by_folder(files: list[str]) -> list[str]:
    """A line of Markdown for each folder, with its files."""
    folders: dict[str, list[str]] = {}
    for file in files:
        folder, _, name = file.rpartition("/")
        folders.setdefault(folder, []).append(f"`{name}`")
    return [f"* `{folder}/`: {', '.join(names)}" for folder, names in folders.items()]


def _page(name: str, schemas: list[str], measured: dict[str, str]) -> str:
    files = _stem_files(name)
    folder = _FOLDERS.get(name, name)
    code = "".join(path.read_text() for path in (_ROOT / "ops" / folder).glob("*.cpp"))
    keys = [
        k for k in _KEYS if f"TORCH_LIBRARY_IMPL(dpa, {k}," in code or f"DPA_{k.upper()}(" in code
    ]
    keys += ["a rule for torch.vmap"] if name in _mapped() else []
    schemas = [textwrap.fill(s, 80, subsequent_indent="    ") for s in schemas]
    lines = [f"# {name}", "", "```", *schemas, "```", ""]
    lines += [f"Kernels: {', '.join(keys)}. [What holds for every op](ops.md).", ""]
    lines += [f"::: dpa.ops.{name}", ""]
    if errors := _errors(name):
        lines += [
            "## Refused",
            "",
            f"Errors begin with `dpa::{name}: ` and go on with, such as:",
            "",
        ]
        lines += [*(f"* `{error}`" for error in errors), ""]
    if name in measured:
        lines += ["## Measured", "", measured[name], ""]
    lines += ["## Where it is", "", *_by_folder(files), ""]
    return "\n".join(lines)


def on_config(config):
    """Name the version in the header, and list a page an op under the section of the reference."""
    text = (_ROOT / "python/dpa/__init__.py").read_text()
    config["site_name"] += " " + re.findall(r'^__version__ = "(.*)"', text, re.M)[0]
    for section in config["nav"]:
        pages = section.get("Reference")
        if pages is not None:
            pages += [{name: f"reference/{name}.md"} for name in sorted(_wrappers())]
    return config


def on_files(files: Files, config) -> Files:
    """Add the reference's pages to the site, and those beside the README."""
    schemas, wrappers = _schemas(), _wrappers()
    measured = json.loads((_ROOT / "docs/reference/measured.json").read_text())
    index = [
        "# The ops",
        "",
        "Each is registered as `torch.ops.dpa.<name>`; `dpa.ops.<name>` is its typed wrapper.",
        "",
        _rules(),
        "",
        "| op | |",
        "|---|---|",
    ]
    for name, first_line in sorted(wrappers.items()):
        page = _page(name, schemas[name], measured)
        files.append(File.generated(config, f"reference/{name}.md", content=page))
        index.append(f"| [{name}]({name}.md) | {first_line} |")
    files.append(File.generated(config, "reference/ops.md", content="\n".join(index) + "\n"))
    for name in _BESIDE_README:
        text = (_ROOT / name).read_text().replace("](docs/", "](")
        for other in _BESIDE_README:
            text = text.replace(f"]({other}", f"]({other.lower()}")
        files.append(File.generated(config, name.lower(), content=text))
    return files


def _help(*words: str) -> str:
    """What ``dpa WORDS --help`` prints, without frames and colours."""
    environment = os.environ | {"PYTHONPATH": str(_ROOT / "python"), "TYPER_USE_RICH": "0"}
    command = [sys.executable, "-m", "dpa", *words, "--help"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.replace("python -m dpa", "dpa").strip()


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Add every command's help to the page of the command line."""
    if page.file.src_uri != "reference/cli.md":
        return markdown
    listed = _help().partition("\nCommands:\n")[2]
    for name in re.findall(r"^  (\w+)", listed, re.M):
        markdown += f"\n### dpa {name}\n\n```text\n{_help(name)}\n```\n"
    return markdown


def on_page_content(html: str, page, config, files) -> str:
    """Show docstrings without reStructuredText's marks: roles, and two colons before a block."""
    html = re.sub(r":(?:class|func|meth|mod|data|attr):(?=<code>)", "", html)
    html = html.replace("::</p>", ":</p>")
    # What is short, an option or a name, is not broken at its hyphens: site.css.
    return re.sub(r"<code>(?=[^<\s]{1,24}</code>)", '<code class="short">', html)
