"""The script of checks for a machine with a GPU, over the double."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from check import SECTIONS, Section, run
from packages import ROOT, child_path

SCRIPT = ROOT / "tests" / "gpu" / "check.py"


@pytest.mark.everything
def test_all_sections_but_those_that_need_a_gpu_pass(tmp_path: Path) -> None:
    written = tmp_path / "gpu.json"
    ran = subprocess.run(
        [sys.executable, SCRIPT, "--double", "--json", written],
        env=os.environ | {"PYTHONPATH": child_path()},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(written.read_text())
    assert found["double"] is True
    status = {one["name"]: one["status"] for one in found["sections"]}
    not_here = {"put and signal to itself", "Dask's tests of CuPy"}
    assert status == {s.name: "not here" if s.name in not_here else "passed" for s in SECTIONS}
    assert all(name in ran.stdout for name in status)


def test_a_whole_run_takes_less_than_five_minutes() -> None:
    assert sum(section.seconds for section in SECTIONS) < 300


@pytest.mark.parametrize(
    ("scene", "n_pes", "status", "words"),
    [
        ("raises", 2, "failed", "ValueError: it raises"),
        *(
            pytest.param(*case, marks=pytest.mark.everything)
            for case in [
                ("hangs", 1, "failed", "PE 0 has not ended after 4 s\nit hangs"),
                ("exits", 1, "failed", "PE 0 was ended with exit code 255\nit exits"),
                ("is_not_here", 2, "not here", "it is not here"),
            ]
        ),
    ],
)
def test_a_section_that_goes_wrong_is_told_on_its_own(
    scene: str, n_pes: int, status: str, words: str
) -> None:
    section = Section(scene, f"check_broken:{scene}", n_pes, 4 if scene == "hangs" else 30)
    outcome = run(section, True, child_path().split(os.pathsep))
    assert outcome.status == status
    assert words in outcome.words


def test_without_a_gpu_it_says_so_in_a_line() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": child_path()}
    ran = subprocess.run(
        [sys.executable, SCRIPT],
        env=os.environ | hidden,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stdout.startswith("There is no GPU to check: ")
    assert len(ran.stdout.strip().splitlines()) == 1
