"""The hook in Dask's reductions: what stands where Dask looks for its ``_tree_reduce``.

All reductions end in that function, which has two names. It is private, so a version of Dask in
which it takes other arguments is refused when the hook is put in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import dask.array as da
import numpy as np
from dask.array import _reductions_generic, reductions

from dask_redist.connect import Ranks
from dask_redist.errors import RedistError
from dask_redist.families import is_wrong_for_one_chunk
from dask_redist.lower import Tree, lower

NAMES: tuple[Any, ...] = (_reductions_generic, reductions)


class ReduceHook:
    """Puts a stand-in for ``_tree_reduce`` in, and takes it out.

    Parameters
    ----------
    settings
        How the hook decides here: (fallback, deterministic), or None where it is not enabled.
    ranks
        The ranks of the cluster at hand, or why there are none.
    """

    def __init__(
        self,
        settings: Callable[[], tuple[str, bool] | None],
        ranks: Callable[[], Ranks | str],
    ) -> None:
        self._settings, self._ranks = settings, ranks
        self._original: Any = None

    def check(self) -> None:
        """See that Dask's function is the one that we know.

        Raises
        ------
        RedistError
            It takes other arguments.
        """
        theirs = [module._tree_reduce for module in NAMES]
        found = list(inspect.signature(theirs[0]).parameters)
        if found != list(Tree._fields) or theirs[0] is not theirs[1]:
            raise RedistError(
                f"dask {version('dask')} has _tree_reduce({', '.join(found)}), this dask_redist "
                f"knows _tree_reduce({', '.join(Tree._fields)}): install another version of one of "
                "them; dask_redist.redistribute works without enable()"
            )

    def put_in(self) -> None:
        """Stand in for Dask's function."""
        self._original = NAMES[0]._tree_reduce
        for module in NAMES:
            module._tree_reduce = self

    def take_out(self) -> None:
        """Dask's function again, unless somebody else stands there meanwhile."""
        for module in NAMES:
            if module._tree_reduce is self:
                module._tree_reduce = self._original

    def __call__(self, *args: Any, **kwargs: Any) -> da.Array:
        tree, settings = Tree(*args, **kwargs), self._settings()
        if settings is None or not _is_across_chunks(tree):
            own: da.Array = self._original(*args, **kwargs)
            return own
        fallback, deterministic = settings
        found = self._ranks()
        if isinstance(found, Ranks):
            return lower(tree, self._original, found, deterministic)
        if fallback == "error":
            raise RedistError(f'{found}; fallback="dask" takes Dask\'s own reduction')
        plain: da.Array = self._original(*args, **kwargs)
        return plain


def _is_across_chunks(tree: Tree) -> bool:
    """Whether several chunks make one, of a kind that is NumPy's.

    One chunk is Dask's, but where Dask is wrong for it.
    """
    x = tree.x
    if not isinstance(x._meta, (np.ndarray, np.generic)):
        return False
    several = any(x.numblocks[a] > 1 for a in tree.axis)
    empty = any(0 in x.chunks[a] for a in range(x.ndim) if a not in tree.axis)
    return several or empty or is_wrong_for_one_chunk(tree.aggregate, tree.dtype)
