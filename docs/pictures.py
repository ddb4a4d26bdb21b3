"""Pictures of what Jupyter shows of ranks, plans and runs, taken in headless Chromium.

python docs/pictures.py FOLDER
"""

import os
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dask.array as da
from distributed import Client, wait

import dask_redist as dr

STYLE = (
    "body { font: 14px sans-serif } table { border-collapse: collapse } td, th { padding: 4px } "
)
STYLE += "pre { white-space: pre-wrap }"


def shown(value: Any) -> str:
    """The HTML of a value, as Jupyter takes it; its text where it has none."""
    html = getattr(value, "_repr_html_", None)
    return str(html()) if html else f"<pre>{escape(repr(value))}</pre>"


def picture(browser: str, html: str, to: Path) -> None:
    with TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{html}")
        # As root Chromium has no sandbox; the page is ours and opens no connection.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        subprocess.run(
            [
                *(browser, "--headless", "--disable-gpu", f"--user-data-dir={folder}/profile"),
                *(*sandbox, "--window-size=900,500", f"--screenshot={to}", page.as_uri()),
            ],
            check=True,
            timeout=60,
            capture_output=True,
        )


def main(folder: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("there is no Chromium: apt install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    with Client(n_workers=4, threads_per_worker=1, dashboard_address=":0") as client:
        ranks = dr.connect(client)
        x = da.ones((512, 512, 64), chunks=(128, -1, -1)).persist()
        plan = dr.plan(x, dr.Pencil.X)
        wait(dr.redistribute(x, dr.Pencil.X).persist())
        for name, value in {"ranks": ranks, "plan": plan, "run": dr.runs()[-1]}.items():
            picture(browser, shown(value), folder / f"{name}.png")
            print(folder / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
