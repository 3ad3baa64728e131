"""Which torch an advice names: one with ops that the LeRobot which is installed allows."""

import pytest

from dpa.diagnostics.host import look
from dpa.library.torches import install, lerobot_bound


@pytest.mark.parametrize(
    ("has", "here", "bound", "expected"),
    [
        (["2.9", "2.11", "2.15"], "2.16.0+cu130", None, "2.15"),
        (["2.9", "2.11", "2.15"], "2.8.0", None, "2.9"),
        (["2.9", "2.11", "2.15"], "2.13.1", None, "2.15"),
        (["2.9", "2.11", "2.15"], None, None, "2.15"),
        (["2.9", "2.10", "2.11"], "2.16.0", "<2.11.0,>=2.2.1", "2.10"),
        (["2.9", "2.11", "2.12"], "2.16.0", "<2.12.0,>=2.7", "2.11"),
        (["2.9"], "2.8.0", ">=2.9.1", "2.9"),
    ],
)
def test_the_nearest_that_is_allowed(has, here, bound, expected):
    assert install(has, here, bound) == f'pip install "torch=={expected}.*"'


def test_none_that_is_allowed():
    assert "ops for a torch that LeRobot allows (<2.9)" in install(["2.9"], "2.16.0", "<2.9")


@pytest.mark.parametrize(
    ("lines", "bound"),
    [
        ("Requires-Dist: numpy>=2\nRequires-Dist: torch<2.12.0,>=2.7\n", "<2.12.0,>=2.7"),
        ('Requires-Dist: torch==2.5.* ; extra == "old"\n', None),
        ("Requires-Dist: torch (what?\n", None),
    ],
)
def test_lerobot_s_own_bound(lines, bound, tmp_path, monkeypatch):
    folder = tmp_path / "lerobot-9.0.dist-info"
    folder.mkdir()
    head = "Metadata-Version: 2.1\nName: lerobot\nVersion: 9.0\n"
    (folder / "METADATA").write_text(head + lines)
    monkeypatch.syspath_prepend(tmp_path)
    assert lerobot_bound() == bound and look().torch_bound == bound
