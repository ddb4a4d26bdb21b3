"""The README's script and the examples run as they are printed, each in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A line that each example prints when all is well; test_taylor_green.py and test_notebook.py run
# those that need more.
EXAMPLES = {
    "slab_to_pencil.py": "same numbers: True",
    "pencil_fft.py": "equal to numpy.fft.fftn: True",
    "time_series.py": "equal to numpy.median: True",
}


def readme_scripts() -> list[str]:
    """Return the Python blocks of README.md."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)


def run(script: Path) -> str:
    """Run a script as a user would and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=script.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{script.name} exited {done.returncode}\n{done.stderr}"
    # An error in a background task does not change the exit status.
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_readme_has_one_script() -> None:
    assert len(readme_scripts()) == 1


def test_readme_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(readme_scripts()[0])
    printed = run(script)
    assert "Slab.Y" in printed, printed
    # 512 rows over 4 ranks: 128 each, and the other axes whole.
    assert len(re.findall(r"512\s+128\s+256", printed)) == 4, printed


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {
        *EXAMPLES,
        "taylor_green.py",
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str) -> None:
    assert EXAMPLES[name] in run(ROOT / "examples" / name).splitlines()
