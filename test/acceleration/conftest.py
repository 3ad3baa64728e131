"""Fixtures of the tests that run LeRobot's commands."""

import pytest
from lerobot_commands import policies_made, unload_plugin


@pytest.fixture
def unloaded():
    """Leaves new policies as they are, once the test is over."""
    yield
    unload_plugin()


@pytest.fixture
def made(monkeypatch):
    """Every policy that is made from now on."""
    return policies_made(monkeypatch)
