"""What one module of dpa may use of another.

The order of the packages is import-linter's part (``make lint``; pyproject.toml has the contract).
Here: a leading underscore keeps a name inside its module, and only programs import the root, which
imports everything. That one takes no heavy module with it.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo

import dpa
from dpa.library.compiling import constant_in_graphs, uncompiled

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


HEAVY = ("torch._dynamo", "torch._inductor", "torch.onnx", "triton", "sympy", "diffusers", "rich")
HEAVY += ("matplotlib", "PIL", "typer", "lerobot", "transformers", "safetensors", "torch.testing")
ADDED = """
import sys, torch
before = set(sys.modules)
import dpa
print(*sorted(set(sys.modules) - before))
"""


def test_the_import_takes_no_heavy_module_besides_torch():
    done = subprocess.run([sys.executable, "-c", ADDED], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert "dpa.sampling.sampler" in names
    assert not [n for n in names if n in HEAVY or n.startswith(tuple(f"{h}." for h in HEAVY))]


def compiled(function, *arguments):
    """What a function answers under torch.compile, how often it is left, and its graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    answer = torch.compile(function, backend="eager")(*arguments)
    counters = torch._dynamo.utils.counters
    return answer, sum(counters["graph_break"].values()), counters["stats"]["calls_captured"]


def test_an_uncompiled_function_is_left_out_of_graphs():
    seen = []

    @uncompiled(reason="it reads itself")
    def apart(x):
        seen.append(torch.compiler.is_compiling())
        return x.sin()

    answer, breaks, calls = compiled(lambda x: apart(x * 2) + 1, torch.ones(2))
    torch.testing.assert_close(answer, torch.full((2,), 2.0).sin() + 1)
    assert seen == [False] and breaks >= 1 and calls == 2  # x * 2 and + 1, not sin
    with pytest.raises(torch._dynamo.exc.Unsupported, match="it reads itself"):
        torch.compile(lambda x: apart(x), backend="eager", fullgraph=True)(torch.ones(2))
    assert apart(torch.zeros(1)) == 0  # and called as it is


def test_a_constant_function_runs_once_a_graph():
    seen = []

    @constant_in_graphs
    def constant():
        seen.append(1)
        return 3

    function = torch.compile(lambda x: x * constant(), backend="eager", fullgraph=True)
    assert function(torch.ones(1)) == 3 and function(torch.ones(1)) == 3
    assert seen == [1]
