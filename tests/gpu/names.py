"""Prints, as JSON, what the installed GPU packages say of the names that dask_redist uses.

Of a function its parameters with their defaults; of an extension type or method, which has no
signature, the first line of its docstring; of an enum its values. An extension module that needs a
library that is not there, named with ``!``, is not loaded: the line is looked for in its file.
"""

import enum
import importlib
import inspect
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def described(dotted: str) -> Any:
    """What a name is, in words that can be compared."""
    if "!" in dotted:
        module, _, path = dotted.partition("!")
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        line = rb"(?<![\w.])" + re.escape(path).encode() + rb"\([^\0\n]*\)"
        lines = re.findall(line, Path(spec.origin).read_bytes())
        return sorted({one.decode() for one in lines})
    module, _, path = dotted.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    if isinstance(found, type) and issubclass(found, enum.Enum):
        return {member.name: member.value for member in found}
    try:
        signature = inspect.signature(found)
    except ValueError:
        return str(found.__doc__).strip().splitlines()[0]
    words = []
    for parameter in signature.parameters.values():
        starred = parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        mark = "**" if parameter.kind == parameter.VAR_KEYWORD else "*" * starred
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        words.append(f"{mark}{parameter.name}{default}")
    return ", ".join(words)


if __name__ == "__main__":
    json.dump({name: described(name) for name in sys.argv[1:]}, sys.stdout)
