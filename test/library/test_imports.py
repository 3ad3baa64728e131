"""What one module of dpa may use of another.

The order of the packages is import-linter's part (``make lint``; pyproject.toml has the contract).
Here: a leading underscore keeps a name inside its module, and only programs import the root, which
imports everything.
"""

import ast
from pathlib import Path

import torch

import dpa

PACKAGE = Path(dpa.__file__).parent
# PyTorch's, whoever sets them.
TORCHS = {*dir(torch.Tensor), *dir(torch.nn.Module())}
FILES = {str(p.relative_to(PACKAGE)): p.read_text() for p in PACKAGE.rglob("*.py")}
PROGRAMS = {"bench", "cli", "demo", "eval", "export"}
# What still reaches across, as (file, name). An entry that is no longer needed fails the test.
EXCEPTIONS: set[tuple[str, str]] = set()


def _private(name):
    return name.startswith("_") and not name.startswith("__")


def defined(tree):
    """Private names that a module makes: functions, classes, variables, attributes that it sets."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def used(tree):
    """Private names that a module imports, or reads from an object."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(names=names, module=module):
                yield from (alias.name for alias in names)
                yield from (module or "").split(".")


def imports_root(tree):
    """Whether a module imports ``dpa`` itself, or from it a name that is no module."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(alias.name == "dpa" for alias in names):
                return True
            case ast.ImportFrom(module="dpa", names=names, level=0):
                if any(not list(PACKAGE.glob(f"{alias.name}*")) for alias in names):
                    return True
    return False


def reached_across(sources):
    """(file, name) for each private name of one file that only others define."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    own = {file: set(filter(_private, defined(tree))) for file, tree in trees.items()}
    every = set().union(*own.values()) - TORCHS
    return {
        (file, name)
        for file, tree in trees.items()
        for name in filter(_private, used(tree))
        if name in every and name not in own[file]
    }


def test_nobody_uses_private_names_of_another_module():
    found = reached_across(FILES)
    assert found == EXCEPTIONS, (
        f"new: {sorted(found - EXCEPTIONS)}; no longer needed: {sorted(EXCEPTIONS - found)}"
    )


def test_uses_of_private_names_are_found():
    a = "_table = 1\nclass A:\n    def _forget(self): self._kept = self._forget"
    b = "from a import _table\nA()._forget()\nx._version, x.__dict__\nx._kept"
    sources = {"a.py": a, "b.py": b}
    names = {"_table", "_forget", "_kept"}
    assert reached_across(sources) == {("b.py", name) for name in names}


def test_only_programs_import_the_root():
    found = {Path(file).parts[0] for file, text in FILES.items() if imports_root(ast.parse(text))}
    assert found <= PROGRAMS


def test_imports_of_the_root_are_found():
    for line in ("import dpa", "from dpa import ops, accelerate"):
        assert imports_root(ast.parse(f"def f():\n    {line}"))
    for line in ("import dpa.ops", "from dpa import ops, reference", "from dpa.ops import layers"):
        assert not imports_root(ast.parse(line))
