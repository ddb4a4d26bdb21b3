"""MPI jobs as a whole, and what must not depend on the process that computes it.

More of them, under their names, are in test_job.py: how a job ends, and what it says.
"""

import os
import subprocess
import sys
from pathlib import Path

from cluster import ar, ranks_in_threads
from test_job import LONG, run

import dask_redist as dr

SIXTEEN = f"""
array = np.arange(9 * 32.0).reshape(9, 32)
with lo() as client:
    assert dr.connect(client).size == 14
    x = da.from_array(array, chunks=(9, 2))
    assert dr.redistribute(x, (9, 5)).sum().compute() == {9 * 32 * (9 * 32 - 1) / 2}
    assert len(dr.runs()) == 1
"""


@LONG
def test_ml02_no_rank_of_many_misses_the_end(tmp_path: Path) -> None:
    # https://github.com/dask/dask-mpi/issues/58
    for _ in range(3):  # each sees to it that no process of it is alive after ten seconds
        done = run(tmp_path, SIXTEEN, 16)
        assert (done.code, done.out, done.err) == (0, "", [])


@LONG
def test_ml02_start_and_end_again_and_again(tmp_path: Path) -> None:
    # https://github.com/dask/dask-mpi/issues/58
    body = """
from mpi4py import MPI
array = np.arange(9 * 16.0).reshape(9, 16)
for again in range(20):
    with lo(exit=False) as client:
        if client is not None:
            x = da.from_array(array, chunks=(9, 2))
            assert (dr.redistribute(x, (9, 5)).compute() == array).all()
    assert MPI.COMM_WORLD.allreduce(1) == 8
print("end")
"""
    done = run(tmp_path, body, 8)
    assert (done.code, done.out, done.err) == (0, "end\n" * 8, [])


KEYS = """
import sys
sys.path.insert(0, TESTS)
from cluster import ar, fa, ranks_in_threads
import dask_redist as dr
if __name__ == "__main__":
    with ranks_in_threads(3):
        x = fa(ar(10, 9), ((1, 4, 5), (2, 7)))
        y = dr.redistribute(dr.redistribute(x + 1, dr.Pencil.X), dr.Slab.Y)
        graph = y.__dask_graph__()
        print(sorted(map(str, dict(graph))))
        print([layer.owners.tolist() for layer in graph.layers.values()
               if hasattr(layer, "owners")])
"""


@LONG
def test_th05_the_graph_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    # https://github.com/dask/dask/issues/12507
    script = tmp_path / "keys.py"
    script.write_text(KEYS.replace("TESTS", repr(str(Path(__file__).parent.parent))))
    found = set()
    for seed in ("0", "1", "2"):
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
    assert found.pop().count("redistribute") > 6


@LONG
def test_th05_ranks_of_other_hash_seeds_agree(tmp_path: Path) -> None:
    # https://github.com/dask/dask/issues/12507
    body = """
import dask.base
with lo() as client:
    seeds = client.run(hash, "dask").values()
    assert len(set(seeds)) == 3, seeds
    array = np.arange(9 * 8.0).reshape(9, 8)
    x = da.from_array(array, chunks=(4, 3))
    found = dask.base.compute(
        dr.redistribute(x, (9, 2)), x.sum(0), dr.redistribute(x, (3, 8)), x.max(1)
    )
    for got, want in zip(found, (array, array.sum(0), array, array.max(1))):
        assert (got == want).all()
    print(len(dr.runs()))
"""
    done = run(tmp_path, body, 5)
    assert (done.code, done.out, done.err) == (0, "2\n", [])


def test_zm06_disagreements_that_cancel_out_are_seen() -> None:
    # https://github.com/helmholtz-analytics/heat/pull/1029
    def code(nothing: None, comm: dr.RankComm, kinds: list[int]) -> str:
        try:
            comm.all_reduce(ar(kinds[comm.rank]))
        except (dr.RedistError, ValueError) as error:
            return str(error)
        return "no error"

    with ranks_in_threads(4) as client:
        for kinds in ([2, 1, 3, 2], [4, 0, 2, 2], [1, 1, 1, 5]):
            found = dr.map_ranks(code, None, kinds, client=client)
            assert len(set(found)) == 1
            assert "shape" in found[0], found
