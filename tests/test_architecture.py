"""ARCHITECTURE.md says what is there, and the layers import only what they may."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.connector.toy_engine import ToyEngine, request
from tests.disk_fakes import make_namespace

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
INVARIANTS = range(1, 10)

PACKAGES = {"kvsnap": ROOT, "kvsnap_connector": ROOT / "connector", "kvsnap_jobs": ROOT / "jobs"}
"""Each with the folder that it is imported from."""
MAY_USE = {
    "kvsnap": {"kvsnap"},
    "kvsnap_connector": {"kvsnap", "kvsnap_connector"},
    "kvsnap_jobs": {"kvsnap", "kvsnap_jobs"},
}
"""jobs -> kvsnap <- connector"""
HEAVY = ("torch", "vllm", "boto3", "botocore", "pyarrow")
NEEDS_VLLM = {"kvsnap_connector.connector", "kvsnap_connector.stats", "kvsnap_connector.wire"}
"""They subclass vLLM's classes; all others can be imported, and tested, without it."""
FOR_TESTS = {"kvsnap.testing"}
"""Imports pytest, so nothing that runs imports it."""

_MODULE_LINE = re.compile(r"- (`\w+\.py`(?:, `\w+\.py`)*): (\S.*)")
"""One module; several where there is nothing to say but their names."""
_TEST_ID = re.compile(r"tests/[\w/]+\.py(?:::\w+)*")


def sources() -> list[Path]:
    """All modules of the three packages but `__init__.py`."""
    found = [path for name, base in PACKAGES.items() for path in (base / name).rglob("*.py")]
    return sorted(path for path in found if path.name != "__init__.py")


def module_name(path: Path) -> str:
    """`kvsnap.tiers.disk`"""
    base = next(base for name, base in reversed(PACKAGES.items()) if path.is_relative_to(base / name))
    return ".".join(path.relative_to(base).with_suffix("").parts)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def section(title: str) -> str:
    """The text below a heading of the page, up to the next one of the same level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"ARCHITECTURE.md has no heading {title}"
    return found[1]


def listed_modules() -> dict[str, str]:
    """Path -> what the page says of it. A list's lines are relative to the folder in the heading above."""
    found: dict[str, str] = {}
    folder = ""
    for line in section("Modules").splitlines():
        if heading := re.match(r"### `([\w/]+)/`", line):
            folder = heading[1] + "/"
        elif item := _MODULE_LINE.fullmatch(line):
            for name in re.findall(r"\w+\.py", item[1]):
                assert folder + name not in found, f"ARCHITECTURE.md lists {folder}{name} twice"
                found[folder + name] = item[2]
    return found


def module_line(path: Path) -> str:
    """What the list should say of a module: the first line of its docstring."""
    text = (ast.get_docstring(parse(path)) or "").splitlines()[0]
    return f"- `{path.name}`: {text.rstrip('.')}"


def named_docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(`Class::test`, its docstring and those around it) of everything that a test id may name."""
    module = parse(path)
    around = ast.get_docstring(module) or ""

    def visit(body: list[ast.stmt], prefix: str, around: str) -> Iterator[tuple[str, str]]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                text = around + "\n\n" + (ast.get_docstring(node) or "")
                yield prefix + node.name, text
                if isinstance(node, ast.ClassDef):
                    yield from visit(node.body, f"{prefix}{node.name}::", text)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield prefix + node.targets[0].id, around  # a state machine's `TestCase`

    yield "", around
    yield from visit(module.body, "", around)


@cache
def docstrings(path: Path) -> dict[str, str]:
    return dict(named_docstrings(path))


def docstring_of(test_id: str) -> str | None:
    """The docstrings that speak for a test; None if there is no such test."""
    file, _, name = test_id.partition("::")
    path = ROOT / file
    return docstrings(path).get(name) if path.is_file() else None


def invariants_in(text: str) -> set[int]:
    """Numbers of the invariants that a docstring names."""
    mentions = re.findall(r"[Ii]nvariants?\s+([^.:;]*)", text)
    return {int(number) for mention in mentions for number in re.findall(r"\b(\d)\b", mention)}


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """(top-level package, whether it is imported with the module) of every import; `TYPE_CHECKING` doesn't count."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name.split(".")[0], at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield (child.module or "").split(".")[0], at_import
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            else:
                yield from visit(child, at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    yield from visit(tree, True)


class TestPage:
    def test_lists_every_module_once(self) -> None:
        """A new module is missing? Its line is in the message; put it where its neighbours are."""
        there = {str(path.relative_to(ROOT)): path for path in sources()}
        listed = listed_modules()
        missing = [
            f"{name.rpartition('/')[0]}/: {module_line(there[name])}" for name in sorted(set(there) - set(listed))
        ]

        assert not missing, "ARCHITECTURE.md lacks these modules:\n" + "\n".join(missing)
        assert not set(listed) - set(there), "ARCHITECTURE.md lists modules that are gone"

    def test_says_of_modules_what_they_say_of_themselves(self) -> None:
        """Loosely: half of the longer words of a line are words of the module's docstring."""
        strange = []
        for name, text in listed_modules().items():
            words = set(re.findall(r"[a-z]{4,}", text.lower()))
            own = set(re.findall(r"[a-z]{4,}", (ast.get_docstring(parse(ROOT / name)) or "").lower()))
            if len(words & own) * 2 < len(words):
                strange.append(f"{name}: {text}")
        assert not strange

    def test_names_only_tests_that_exist(self) -> None:
        ids = _TEST_ID.findall(PAGE.read_text())
        assert ids
        assert not [test_id for test_id in ids if docstring_of(test_id) is None]

    def test_names_only_files_that_exist(self) -> None:
        """Paths in backticks, as in the numbered steps; those of the module list are relative to their heading."""
        text = PAGE.read_text().replace(section("Modules"), "")
        names = re.findall(r"`((?:[a-z_]+/)*[a-z_0-9]+\.py)`", text)
        there = {str(path.relative_to(ROOT)) for path in sources()}
        unknown = [name for name in names if not any(f"/{path}".endswith(f"/{name}") for path in there)]
        assert names
        assert not [name for name in unknown if not (ROOT / name).is_file()]

    @pytest.mark.parametrize("number", INVARIANTS)
    def test_guards_each_invariant_with_tests_that_name_it(self, number: int) -> None:
        found = re.search(rf"^{number}\. (.*?)(?=^\d\. |\Z)", section("Invariants"), re.MULTILINE | re.DOTALL)
        assert found is not None
        ids = _TEST_ID.findall(found[1])

        assert ids, f"no test guards invariant {number}"
        strangers = [test_id for test_id in ids if number not in invariants_in(docstring_of(test_id) or "")]
        assert not strangers, f"these tests don't name invariant {number} in their docstring"


class TestLayers:
    @pytest.mark.parametrize("package", PACKAGES)
    def test_packages_use_only_what_is_below_them(self, package: str) -> None:
        """jobs -> kvsnap <- connector"""
        wrong = {
            (module_name(path), name)
            for path in (PACKAGES[package] / package).rglob("*.py")
            for name, _ in imports(parse(path))
            if name in PACKAGES and name not in MAY_USE[package]
        }
        assert not wrong

    def test_only_the_connector_imports_vllm_and_torch(self) -> None:
        users = {module_name(path) for path in sources() if {"torch", "vllm"} & {n for n, _ in imports(parse(path))}}
        at_once = {module_name(path) for path in sources() if ("vllm", True) in set(imports(parse(path)))}

        assert all(name.startswith("kvsnap_connector.") for name in users)
        assert at_once == NEEDS_VLLM

    def test_importing_kvsnap_is_light(self) -> None:
        """An engine without snapshots loads no pyarrow, one without S3 no boto3; tests of the core need no vLLM."""
        names = [module_name(path) for path in sources()]
        core = [name for name in names if name.startswith("kvsnap.") and name not in FOR_TESTS]
        rest = [name for name in names if name.startswith("kvsnap_") and name not in NEEDS_VLLM]
        script = f"""
import importlib, sys

def loaded(names, watched):
    for name in names:
        importlib.import_module(name)
        found = [heavy for heavy in watched if heavy in sys.modules]
        assert not found, f"importing {{name}} imports {{', '.join(found)}}"

loaded(["kvsnap"] + {core!r}, {[*HEAVY, "pytest", "click", "kvsnap_connector", "kvsnap_jobs"]!r})
loaded(["kvsnap_connector", "kvsnap_jobs"] + {rest!r}, {[*HEAVY, "pytest"]!r})
"""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PACKAGES.values()))}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)

        assert done.returncode == 0, done.stderr


def test_every_miss_has_a_reason(tmp_path: Path) -> None:
    """Invariant 9: who got less than there could have been is counted once, by a reason in words."""
    engine = ToyEngine(make_namespace(), tmp_path / "cache", tmp_path, slots=4, prefix_caching=False)
    prompt = list(range(200))
    missing = [
        request("nobody had it before", prompt),
        request("shorter than a block", prompt[:9]),
        request("not cacheable", prompt, cacheable="prompt embeddings"),
        request("not allowed", prompt, may_load=False),
        request("another salt", prompt, salt="tenant"),
    ]
    try:
        for one in missing:
            engine.run(one)
        engine.run(hit := request("hit", prompt))
        engine.planner.off_reason = "a test said so"
        engine.run(off := request("off", prompt))
        reasons = dict(engine.planner.misses)
    finally:
        engine.kill()

    assert hit.loaded_tokens == 192
    assert [one.loaded_tokens for one in [*missing, off]] == [0] * 6
    assert reasons == {
        "not in the tiers": 2,
        "prompt below minimum: 17 tokens": 1,
        "request not cacheable: prompt embeddings": 1,
        "loading not allowed by role or request": 1,
        "off: a test said so": 1,
    }
