"""Every promise names what tests it, and what it names exists."""

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FILES = {path.name: path for path in (_ROOT / "test").rglob("*.*")}
_TARGETS = set(re.findall(r"^([\w-]+):", (_ROOT / "Makefile").read_text(), re.M))
_TESTS_IN_CPP = (_ROOT / "test" / "cpp" / "CMakeLists.txt").read_text()
_REFERENCE = re.compile(
    r"`(?:(?P<file>[\w/]*\w+\.(?:py|cpp|cu|sh|supp))(?:::(?P<name>\w+))?"
    r"|make (?P<target>[\w-]+)[^`]*|(?P<built>\w+_test))`"
)


def _promises():
    """The paragraphs and list items of the page, but its first and what is not promised."""
    text = (_ROOT / "docs" / "promises.md").read_text().partition("## Not promised")[0]
    blocks = re.split(r"\n\n|\n(?=\* |## )", text)
    kept = [" ".join(block.split()) for block in blocks if not block.lstrip().startswith("#")]
    return [block for block in kept if block][1:]


@pytest.mark.parametrize("promise", _promises(), ids=lambda promise: promise[:40])
def test_a_promise_names_its_test(promise):
    references = list(_REFERENCE.finditer(promise))
    assert references, "it names no test"
    rest = promise[references[-1].end() :]
    assert not re.search(r"\. \S", rest), f"sentences behind the last test: {rest}"


@pytest.mark.parametrize("promise", _promises(), ids=lambda promise: promise[:40])
def test_what_it_names_exists(promise):
    for found in _REFERENCE.finditer(promise):
        if found["target"]:
            assert found["target"] in _TARGETS, found[0]
        elif found["built"]:
            assert found["built"] in _TESTS_IN_CPP, found[0]
        else:
            path = _FILES.get(Path(found["file"]).name)
            assert path is not None and path.as_posix().endswith(found["file"]), found[0]
            if found["name"]:
                defined = re.findall(
                    r"^def (\w+)\(|^TEST(?:_F)?\((\w+, \w+)", path.read_text(), re.M
                )
                assert found["name"] in {name for name, _ in defined}, found[0]


def test_a_promise_without_a_test_is_found():
    for text in ("Nothing is lost.", "Kept (`test_words.py`). Nothing is lost."):
        with pytest.raises(AssertionError):
            test_a_promise_names_its_test(text)
    for text in (
        "(`test_words.py::test_none`)",
        "(`test_none.py`)",
        "(`make none`)",
        "(`no_test`)",
    ):
        with pytest.raises(AssertionError):
            test_what_it_names_exists(text)
