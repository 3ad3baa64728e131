"""The table of slow tests names what there is, and leaves every package some tests."""

import ast
from pathlib import Path, PurePath

import slow

TEST = Path(__file__).parents[1]


def functions(file):
    tree = ast.parse((TEST / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_entry_names_a_test():
    assert all(list((TEST / folder).glob("test_*.py")) for folder in slow.FOLDERS)
    assert all((TEST / file).is_file() for file in (*slow.FILES, *slow.LONGEST))
    for file, names in slow.TESTS.items():
        assert set(names) <= functions(file), file


def test_every_package_keeps_quick_tests():
    kept = {
        file.parent.name
        for file in TEST.glob("*/test_*.py")
        for name in functions(file)
        if name.startswith("test_") and not slow.is_slow(PurePath(file.relative_to(TEST)), name)
    }
    packages = {"acceleration", "checkpoints", "library", "nn", "ops", "packed", "sampling"}
    assert packages | {"schedulers", "training"} <= kept
