"""What other programs read about the project: who to cite, and the forms of issues."""

import tomllib

import pytest
import yaml

from tests.support import ROOT


def test_the_citation_is_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    assert lab["version"] == project["version"]
    assert f"codd-lm[eval]=={lab['version']}" in lab["dependencies"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert citation["keywords"] == project["keywords"]
    paper = citation["preferred-citation"]
    assert paper["type"] == "conference-paper"
    assert paper["title"] in (ROOT / "README.md").read_text()
    assert all(author.keys() == {"given-names", "family-names"} for author in paper["authors"])


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_forms_of_issues_ask_under_names_of_their_own(name):
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) >= 2
    assert all(field["attributes"]["label"] for field in fields)
