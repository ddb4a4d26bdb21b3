"""Compile the one C file of the package, which is optional, when it is installed."""

import os
import platform
import shlex
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
        target.unlink(missing_ok=True)
        if platform.machine() != "x86_64":
            return  # it would be memcpy
        command = shlex.split(os.environ.get("CC") or "cc")
        command += ["-O2", "-shared", "-fPIC", "-o", str(target), str(source)]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", error)
            self.app.display_warning(f"copies will not go past the cache: {command}: {said}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append("dask_redist/_stream.so")
