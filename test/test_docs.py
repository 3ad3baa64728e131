"""Every Python block in the documentation runs."""

import re
from pathlib import Path

import pytest

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


def test_links_lead_somewhere():
    for page in _PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
