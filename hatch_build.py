"""Compile the one C file of the package, which is optional, when it is installed."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StreamHook(BuildHookInterface[Any]):
    """Makes ``dask_redist/_stream.so``; without a compiler the package does without."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built, also that of an editable install."""
        source = Path(self.root, "dask_redist", "_stream.c")
        target = source.with_suffix(".so")
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            self.app.display_warning("no C compiler: copies will not go past the cache")
            return
        options = ["-O2", "-shared", "-fPIC"]
        command = [compiler, *options, "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self.app.display_warning(f"{' '.join(command)} failed: {done.stderr}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append("dask_redist/_stream.so")
