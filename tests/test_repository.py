"""What holds for the repository as a whole: metadata, changes, and what its files speak of."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dask_redist"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
ENVIRONMENT: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text())

# ---- Metadata that is written in two places. ----


def test_environment_names_the_python_and_every_extra() -> None:
    *conda, with_pip = ENVIRONMENT["dependencies"]
    assert conda == [f"python {PROJECT['requires-python']}", "pip"]
    (line,) = with_pip["pip"]
    found = re.fullmatch(r"--editable \.\[([\w,]+)\]", line)
    assert found, line
    # Which of these a machine takes depends on its GPU driver; they exclude each other.
    of_gpus = {"cuda12", "cuda13"}
    assert found[1].split(",") == sorted(PROJECT["optional-dependencies"].keys() - of_gpus)
    assert ENVIRONMENT["name"] == PROJECT["name"]


def test_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]


def test_typed_and_with_default_settings() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert set(yaml.safe_load((PACKAGE / "redist.yaml").read_text())) == {"redist"}


# ---- Fragments in changes/. ----

FRAGMENT_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\.(feature|bugfix|doc|removal|misc)\.md")


def fragment_fault(name: str, text: str) -> str | None:
    """Return what is wrong with a fragment, or None."""
    if not FRAGMENT_NAME.fullmatch(name):
        return f"{name} is not NAME.TYPE.md as changes/README.md says"
    if not text.endswith(".\n") or "\n\n" in text or text.startswith("#"):
        return f"{name} is not one paragraph of whole sentences"
    return None


def test_changes_are_well_formed() -> None:
    fragments = [path for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
    faults = [fragment_fault(path.name, path.read_text()) for path in fragments]
    assert [fault for fault in faults if fault] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("12.md", "A thing.\n"),
        ("A_thing.feature.md", "A thing.\n"),
        ("a-thing.fix.md", "A thing.\n"),
        ("a-thing.feature.md", ""),
        ("a-thing.feature.md", "A thing\n"),
        ("a-thing.feature.md", "# A thing\n\nIt is.\n"),
    ],
)
def test_the_fragment_check_sees(name: str, text: str) -> None:
    assert fragment_fault(name, text)


# ---- The files speak of the project alone. ----

# Built of character classes, so that this file does not find itself.
FOREIGN = re.compile(
    r"""
      (?<![\w.])/(work|root|home|tmp/[b]rief)/      # a path on the machine of one author
    | (?<![\w/])[s]hared/                           # a folder that no checkout has
    | (?<![\w/&\#"'])\#\d{1,5}\b                    # a number in some tracker
    | \b(TO[D]O|FIX[M]E|XX[X])\b                    # what is not done is said in words
    | \b(this|last|next|previous|another)\s[s]ession\b
    | \b(the|this|my|your)\s[b]rief\b
    """,
    re.VERBOSE,
)
NOT_OURS = {"__pycache__", "_build", "generated", "build", "dist"}


def our_files() -> Iterator[Path]:
    """Yield the text files of the checkout, without what is made from them."""

    def ours(path: Path) -> bool:
        return path.name not in NOT_OURS and (not path.name.startswith(".") or path.name == ".ci")

    folders = [ROOT]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_dir() and not path.is_symlink():
                if ours(path):
                    folders.append(path)
            elif path.is_file():
                yield path


def test_files_speak_of_the_project_alone() -> None:
    found = []
    for path in our_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := FOREIGN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert found == []


def test_our_files_are_all_kinds() -> None:
    names = {str(path.relative_to(ROOT)) for path in our_files()}
    assert {"README.md", ".ci/run", "docs/conf.py", "dask_redist/__init__.py"} <= names
    assert not any(name.startswith((".venv", ".git/")) for name in names)


@pytest.mark.parametrize(
    "line",
    [
        "see /" + "home/me/notes",
        "as in " + "shared" + "/design",
        "fixes " + "#" + "12",
        "# " + "TO" + "DO: later",
        "in the " + "last " + "session",
    ],
)
def test_the_word_check_sees(line: str) -> None:
    assert FOREIGN.search(line)


@pytest.mark.parametrize(
    "line",
    ["# 3 ranks", "/tmp/dask", "fill:#57606a", "dask#10226", "a shared mapping", "https://x/work/"],
)
def test_the_word_check_allows(line: str) -> None:
    assert not FOREIGN.search(line)
