"""The reference: a page an op, made from its schema, its docstring and the files of its stem.

A hook of MkDocs. Nothing is written down twice: the schema is read from ops/library.cpp, the rest
of a page is the docstring of ``dpa.ops`` and what docs/reference/measured.json says of its speed.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from pathlib import Path

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parent.parent
_KEYS = {
    "cpu": "CPU",
    "cuda": "CUDA",
    "meta": "Meta",
    "autograd": "Autograd",
    "autocast": "Autocast",
    "vmap": "vmap",
}


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
    tree = ast.parse((_ROOT / "python/dpa/ops.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        f.name: (ast.get_docstring(f) or "").partition("\n")[0]
        for f in functions
        if not f.name.startswith("_")
    }


def _stem_files(name: str) -> list[str]:
    folders = [_ROOT / "ops" / name, _ROOT / "kernels" / name]
    files = [path for folder in folders for path in sorted(folder.glob("*")) if path.is_file()]
    files += sorted(_ROOT.glob(f"kernels/{name}.*")) + sorted(_ROOT.glob(f"test/test_{name}.py"))
    return [str(path.relative_to(_ROOT)) for path in files]


def _page(name: str, schemas: list[str], measured: dict[str, str]) -> str:
    files = _stem_files(name)
    keys = [key for stem, key in _KEYS.items() if f"ops/{name}/{stem}.cpp" in files]
    schemas = [textwrap.fill(s, 90, subsequent_indent="    ") for s in schemas]
    lines = [f"# {name}", "", "```", *schemas, "```", ""]
    lines += [f"Kernels: {', '.join(keys)}.", "", f"::: dpa.ops.{name}", ""]
    if name in measured:
        lines += ["## Measured", "", measured[name], ""]
    lines += ["## Where it is", "", *(f"* `{path}`" for path in files), ""]
    return "\n".join(lines)


def on_config(config):
    """List a page an op in the navigation, under the section that names this file's index."""
    for section in config["nav"]:
        pages = section.get("Reference")
        if pages is not None:
            pages += [{name: f"reference/{name}.md"} for name in sorted(_wrappers())]
    return config


def on_files(files: Files, config) -> Files:
    """Add the reference's pages to the site."""
    schemas, wrappers = _schemas(), _wrappers()
    measured = json.loads((_ROOT / "docs/reference/measured.json").read_text())
    index = [
        "# The ops",
        "",
        "Each is registered as `torch.ops.dpa.<name>`; `dpa.ops.<name>` is its typed wrapper.",
        "",
        "| op | |",
        "|---|---|",
    ]
    for name, first_line in sorted(wrappers.items()):
        page = _page(name, schemas[name], measured)
        files.append(File.generated(config, f"reference/{name}.md", content=page))
        index.append(f"| [{name}]({name}.md) | {first_line} |")
    files.append(File.generated(config, "reference/ops.md", content="\n".join(index) + "\n"))
    return files


def on_page_content(html: str, page, config, files) -> str:
    """Show one colon where a docstring ends a line in two, which announces a literal block."""
    return html.replace("::</p>", ":</p>")
