"""The documents name everything that a user can touch, and what they link to is there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvsnap.config import Config
from kvsnap_jobs.cli import main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CHANGELOG = ROOT / "CHANGELOG.md"
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "__pycache__")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")])

_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
_COMMAND = re.compile(r"(?<!-n )\bkvsnap ((?:[a-z]+)(?=[ `]|$))", re.MULTILINE)


def links(page: Path) -> list[tuple[str, str]]:
    """Path and fragment of every relative link."""
    return _LINK.findall(page.read_text())


def anchors(page: Path) -> set[str]:
    """Fragments that the page's headings make, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_is_in_readme_and_changelog(command: str) -> None:
    assert f"`kvsnap {command}" in README.read_text()
    assert re.search(rf"`(kvsnap )?{command}\b", CHANGELOG.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_a_command_that_is_not_there(page: Path) -> None:
    """Only where it stands in code; prose says "kvsnap does …"."""
    code = re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL)
    named = {name for part in code for name in _COMMAND.findall(part)}

    assert named <= set(main.commands)


def test_every_key_and_its_default_are_in_the_readme() -> None:
    rows = [line.split("|")[1:4] for line in README.read_text().splitlines() if line.startswith("| `")]
    told = {key: default.strip() for keys, default, _ in (row for row in rows if len(row) == 3)
            for key in re.findall(r"`(\w+)`", keys)}  # fmt: skip
    defaults = Config()

    for key in (field.name for field in fields(Config)):
        assert key in told
        value = getattr(defaults, key)
        if isinstance(value, str) and value:
            assert value in told[key]
        elif isinstance(value, bool):
            assert told[key] == str(value).lower()
        elif isinstance(value, float):
            assert f"{value:g}" in told[key]


@pytest.mark.parametrize("page", [*ROOT.glob("docs/*.md"), CHANGELOG, ROOT / "ARCHITECTURE.md"], ids=lambda p: p.name)
def test_every_page_is_linked_from_the_readme(page: Path) -> None:
    assert str(page.relative_to(ROOT)) in {path for path, _ in links(README)}


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_every_example_has_a_page_that_the_readme_links(folder: Path) -> None:
    assert (folder / "README.md").read_text().startswith("# ")
    assert f"examples/{folder.name}/README.md" in {path for path, _ in links(README)}
    assert f"`{folder.name}`" in CHANGELOG.read_text() or folder.name == "demo"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for path, fragment in links(page):
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not fragment or target.suffix != ".md" or fragment in anchors(target), f"{page.name}: #{fragment}"


def test_every_make_target_of_the_documents_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w%-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        code = re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL)
        for name in re.findall(r"\bmake ([a-z][\w-]*)", "\n".join(code)):
            is_example = name.startswith("example-") and (ROOT / "examples" / name.removeprefix("example-")).is_dir()
            assert name in targets or is_example, f"{page.name}: make {name}"
