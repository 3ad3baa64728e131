"""The files of a release agree: versions, workflows, the changelog's form."""

import re
from pathlib import Path

import pytest

import dpa

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("pyproject.toml", r'^version = "(.*)"$'),
        ("CMakeLists.txt", r"^project\(dpa VERSION (\S+)"),
        ("CITATION.cff", r"^version: (.*)$"),
    ],
)
def test_every_file_says_the_same_version(file, line):
    assert re.findall(line, (ROOT / file).read_text(), re.M) == [dpa.__version__]


def test_the_changelog_has_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.M)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", v) for v in versions[1:])
    assert set(re.findall(r"^### (.*)$", text, re.M)) <= KINDS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_exists_and_pins_what_it_takes(path):
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):(?!=)", makefile, re.M))
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] and not job["runs-on"].endswith("latest")
        included = job.get("strategy", {"matrix": {"include": []}})["matrix"]["include"]
        for step in job["steps"]:
            if "uses" in step:
                assert re.search(r"@[0-9a-f]{40}$", step["uses"]), step
            for target in re.findall(r"\bmake (\S+)", step.get("run", "").replace("{{ ", "{{")):
                if target.startswith("$"):
                    assert included and {entry["target"] for entry in included} <= targets
                else:
                    assert target in targets


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_forms_name_commands_that_exist(path):
    pytest.importorskip("yaml").safe_load(path.read_text())
    from dpa.cli.app import app

    names = {c.name or c.callback.__name__ for c in app.registered_commands}
    assert set(re.findall(r"\bdpa (doctor|explain|bench|info)\b", path.read_text())) <= names


def test_the_citation_has_what_the_format_requires():
    citation = pytest.importorskip("yaml").safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version"} <= set(citation)
