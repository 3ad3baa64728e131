"""Lays out a new op as a copy of one that works, under a new name: `make op NAME=swish_mult`.

The copy computes what its model computes; it builds, and its tests pass, before anything is
changed. Each place that it makes or edits is printed: they are all that an op is.
"""

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

_MODEL = "fused_relu_add"


def _camel(name: str) -> str:
    return name.title().replace("_", "")


class Layout:
    """The places of an op, in a checkout at ``root``."""

    def __init__(self, root: Path, model: str, name: str):
        self.root, self.model, self.name = root, model, name
        self.made: list[Path] = []
        self.edited: list[Path] = []

    def renamed(self, text: str) -> str:
        """The text with the new op's name for the model's."""
        return text.replace(self.model, self.name).replace(_camel(self.model), _camel(self.name))

    def files(self) -> None:
        """The folders of the op and of its kernels, and its test."""
        sources = list(self.root.glob(f"ops/{self.model}/*"))
        sources += self.root.glob(f"kernels/cuda/{self.model}/*")
        sources.append(self.root / f"test/ops/test_{self.model}.py")
        for source in sorted(sources):
            target = self.root / self.renamed(str(source.relative_to(self.root)))
            target.parent.mkdir(exist_ok=True)
            target.write_text(self.renamed(source.read_text()))
            self.made.append(target)

    def _insert(self, path: Path, parts: list[tuple[int, str]]) -> None:
        """Put each text behind the line of that number, counted from 1."""
        lines = path.read_text().splitlines(keepends=True)
        for line, text in sorted(parts, reverse=True):
            lines.insert(line, text)
        path.write_text("".join(lines))
        self.edited.append(path)

    def schema(self) -> None:
        """The model's schemas in the table of contents, behind them."""
        path = self.root / "ops/library.cpp"
        text = path.read_text()
        of_op = rf"  m\.def\(\s*\"{self.model}(?:_forward|_backward|\.out)?\(.*?\);\n"
        found = list(re.finditer(of_op, text, re.S))
        new = "\n" + "".join(self.renamed(match[0]) for match in found)
        self._insert(path, [(text.count("\n", 0, found[-1].end()), new)])

    def function(self, path: Path) -> None:
        """The model's Python function, behind it, and its name in ``__all__``."""
        text = path.read_text()
        parts = []
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == self.model:
                code = self.renamed(ast.get_source_segment(text, node))
                parts.append((node.end_lineno, f"\n\n{code}\n"))
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                parts.append((node.lineno, f'    "{self.name}",\n'))
        self._insert(path, parts)

    def batching_rule(self) -> None:
        """The rule of torch.vmap; an op without one is mapped in a loop."""
        path = self.root / "python/dpa/ops/batching.py"
        text = path.read_text()
        of_op = rf'^ +"{self.model}": \w+\(ops\.{self.model}\),\n'
        if match := re.search(of_op, text, re.M):
            line = text.count("\n", 0, match.end())
            self._insert(path, [(line, self.renamed(match[0]))])

    def lay_out(self) -> list[Path]:
        """Make all of it; the places, as many as there are."""
        self.files()
        self.schema()
        wrappers = self.root.glob("python/dpa/ops/*.py")
        (wrapper,) = [path for path in wrappers if f"def {self.model}(" in path.read_text()]
        self.function(self.root / "python/dpa/reference/__init__.py")
        self.function(wrapper)
        self.batching_rule()
        return [*self.made, *self.edited]


def _format(paths: list[Path]) -> None:
    tools = Path(sys.executable).parent
    python = [path for path in paths if path.suffix == ".py"]
    other = [path for path in paths if path.suffix != ".py"]
    subprocess.run([tools / "clang-format", "-i", *other], check=True)
    subprocess.run([tools / "ruff", "check", "-q", "--fix", *python], check=True)
    subprocess.run([tools / "ruff", "format", "-q", *python], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the new op, in lower case with underscores")
    name = parser.parse_args().name
    root = Path(__file__).parents[1]
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or (root / "ops" / name).exists():
        parser.error(f"NAME must be a new name in lower case with underscores, got {name}")
    layout = Layout(root, _MODEL, name)
    _format(layout.lay_out())
    for verb, paths in (("made", layout.made), ("edited", layout.edited)):
        for path in paths:
            print(f"{verb:7}{path.relative_to(root)}")
