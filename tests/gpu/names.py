"""Prints, as JSON, what the installed GPU packages say of the names that dask_redist uses.

Of a function its parameters with their defaults; of an extension type or method, which has no
signature, the first line of its docstring; of an enum its values.
"""

import enum
import importlib
import inspect
import json
import sys
from typing import Any


def described(dotted: str) -> Any:
    """What a name is, in words that can be compared."""
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
