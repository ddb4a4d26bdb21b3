"""Every name of the GPU packages that dask_redist uses is what it was written against.

What the tests' double replaces is listed too: a double of something else would show nothing.
"""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from packages import FOLDER, ROOT, child_path

STREAM = "remote_pe=-1, stream=None"
CONTRACT: dict[str, Any] = {
    "nvshmem.core:get_unique_id": "empty=False",
    "nvshmem.core:init": (
        "device=None, uid=None, rank=None, nranks=None, mpi_comm=None, initializer_method=''"
    ),
    "nvshmem.core:finalize": "",
    "nvshmem.core:init_status": "",
    "nvshmem.core:buffer": "size, release=False, except_on_del=True",
    "nvshmem.core:free": "buffer",
    "nvshmem.core:get_peer_buffer": "buffer, pe",
    "nvshmem.core:put_nbi": f"dst, src, {STREAM}",
    "nvshmem.core:put_signal": f"dst, src, signal_var, signal_val, signal_op, {STREAM}",
    "nvshmem.core:signal_op": f"signal_var, signal_val, signal_op, {STREAM}",
    "nvshmem.core:signal_wait": "signal_var, signal_val, signal_op, stream=None",
    "nvshmem.core:quiet": "stream=None",
    "nvshmem.core:barrier_all": "stream=None",
    "nvshmem.core:SignalOp": {"SIGNAL_SET": 9, "SIGNAL_ADD": 10},
    "nvshmem.core:ComparisonType": {
        **{"CMP_EQ": 0, "CMP_NE": 1, "CMP_GT": 2, "CMP_LE": 3, "CMP_LT": 4, "CMP_GE": 5},
        "CMP_SENTINEL": 32767,
    },
    "nvshmem.core:InitStatus": {
        **{"STATUS_NOT_INITIALIZED": 0, "STATUS_IS_BOOTSTRAPPED": 1, "STATUS_IS_INITIALIZED": 2},
        **{"STATUS_LIMITED_MPG": 3, "STATUS_FULL_MPG": 4, "STATUS_INVALID": 32767},
    },
    # the bindings: `ptr` is used, the others are what the double stands for
    "nvshmem.bindings:ptr": "dest, pe",
    "nvshmem.bindings:malloc": "size",
    "nvshmem.bindings:free": "ptr",
    "nvshmem.bindings:my_pe": "",
    "nvshmem.bindings:init_status": "",
    "nvshmem.bindings:get_uniqueid": "uniqueid",
    "nvshmem.bindings:set_attr_uniqueid_args": "myrank, nranks, uniqueid, attr",
    "nvshmem.bindings:hostlib_init_attr": "flags, attr",
    "nvshmem.bindings:hostlib_finalize": "",
    "nvshmem.bindings:putmem_nbi_on_stream": "dest, source, bytes, pe, cstrm",
    "nvshmem.bindings:putmem_signal_on_stream": (
        "dest, source, bytes, sig_addr, signal, sig_op, pe, cstrm"
    ),
    "nvshmem.bindings:signal_op_on_stream": "sig_addr, signal, sig_op, pe, cstrm",
    "nvshmem.bindings:signal_wait_until_on_stream": "sig_addr, cmp, cmp_value, cstream",
    "nvshmem.bindings:quiet_on_stream": "cstrm",
    "nvshmem.bindings:barrier_all_on_stream": "stream",
    "nvshmem.bindings:uniqueid": "uniqueid(size=1)",
    "nccl.core:get_unique_id": "empty=False",
    "nccl.core:UniqueId.from_bytes": "b",
    "nccl.core:Communicator.init": "nranks, rank, unique_id, config=None",
    "nccl.core:Communicator.reduce": (
        "self, sendbuf, recvbuf, op, root=None, *stream=None, *config=None"
    ),
    "nccl.core:Communicator.allreduce": ("self, sendbuf, recvbuf, op, *stream=None, *config=None"),
    "nccl.core:Communicator.reduce_scatter": (
        "self, sendbuf, recvbuf, op, *stream=None, *config=None"
    ),
    "nccl.core:Communicator.get_async_error": "self",
    "nccl.core:Communicator.split": "self, color=None, key=0, config=None",
    "nccl.core:Communicator.abort": "self",
    "nccl.core:Communicator.destroy": "self",
    "nccl.core:NcclRedOp": {"SUM": 0, "PROD": 1, "MAX": 2, "MIN": 3, "AVG": 4},
    "nccl.bindings.nccl:comm_init_rank_scalable": "nranks, myrank, n_id, comm_ids, config",
    "nccl.bindings.nccl:all_reduce": "sendbuff, recvbuff, count, datatype, op, comm, stream",
    "nccl.bindings.nccl:reduce": "sendbuff, recvbuff, count, datatype, op, root, comm, stream",
    "nccl.bindings.nccl:reduce_scatter": (
        "sendbuff, recvbuff, recvcount, datatype, op, comm, stream"
    ),
    "nccl.bindings.nccl:comm_get_async_error": "comm",
    "nccl.bindings.nccl:comm_split": "comm, color, key, config",
    "nccl.bindings.nccl:comm_abort": "comm",
    "nccl.bindings.nccl:comm_destroy": "comm",
    **{
        f"cupy_backends.cuda.libs.nccl!{line.partition('(')[0]}": [line]
        for line in (
            "NcclCommunicator.reduce(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, "
            "int datatype, int op, int root, intptr_t stream)",
            "NcclCommunicator.allReduce(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, "
            "int datatype, int op, intptr_t stream)",
            "NcclCommunicator.reduceScatter(self, intptr_t sendbuf, intptr_t recvbuf, "
            "size_t recvcount, int datatype, int op, intptr_t stream)",
            "NcclCommunicator.commSplit(self, int color, int key, NcclConfig config=None)",
            "get_unique_id()",
            "NcclCommunicator(int ndev, bytes commId, int rank, NcclConfig config=None)",
            "NcclCommunicator.check_async_error(self)",
            "NcclCommunicator.abort(self)",
            "NcclCommunicator.destroy(self)",
        )
    },
    "cuda.core:Device": "device_id=None",
    "cuda.core:Device.set_current": "self, ctx=None",
    "cuda.core:Buffer.from_handle": "ptr, size, mr=None, owner=None, *stream=None",
    "cupy.cuda:UnownedMemory": (
        "UnownedMemory(intptr_t ptr, size_t size, owner, int device_id=-1)"
    ),
    "cupy.cuda:MemoryPointer": "MemoryPointer(BaseMemory mem, ptrdiff_t offset)",
    "cupy.cuda:Device": "Device(device=None)",
    "cupy.cuda:Device.use": "Device.use(self)",
    "cupy.cuda:Device.synchronize": "Device.synchronize(self)",
    "cupy.cuda:get_current_stream": "get_current_stream(int device_id=-1)",
    "cupy.cuda:Stream": "null=False, non_blocking=False, ptds=False, priority=None",
    "cupy.cuda:Stream.record": "self, event=None",
    "cupy.cuda:Stream.wait_event": "self, event",
    "cupy.cuda:Stream.synchronize": "self",
    "cupy.cuda:Stream.__cuda_stream__": "self",
    "cupy.cuda:Event.synchronize": "self",
}


def said(*names: str) -> Any:
    run = subprocess.run(
        [sys.executable, ROOT / "tests" / "gpu" / "names.py", *names],
        env={"PYTHONPATH": child_path(), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_packages_are_what_we_use() -> None:
    assert said(*CONTRACT) == CONTRACT


def test_the_contract_sees_another_signature() -> None:
    (words,) = said("nvshmem.core:quiet").values()
    assert words == "stream=None"
    assert said("json:dumps")["json:dumps"].startswith("obj, *skipkeys=False")
    with pytest.raises(AssertionError, match="no attribute 'fence'"):
        said("nvshmem.core:fence")


def test_every_name_that_we_use_is_in_the_contract() -> None:
    """Names that follow `nv.`, `bindings.` and so on in the modules that wrap the packages."""
    aliases = {
        "nccl": "nccl.core",
        "self._nccl": "nccl.core:Communicator",
        "nv": "nvshmem.core",
        "bindings": "nvshmem.bindings",
        "cuda": "cupy.cuda",
        "self._cupy": "cupy_backends.cuda.libs.nccl!NcclCommunicator",
    }
    used = set()
    for module in ("nvshmem", "gpu", "ncclcalls"):
        path = ROOT / "dask_redist" / f"{module}.py"
        after = (
            r"(?:\b_|[= (])(nv|bindings|cuda|self\._nccl|self\._cupy|nccl)\.(?!core\b)([A-Za-z]\w*)"
        )
        for alias, name in re.findall(after, path.read_text()):
            used.add(f"{aliases[alias]}{'.' if 'self' in alias else ':'}{name}")
    # Of a class that is named its methods are there.
    held = {name.rpartition(".")[0] for name in CONTRACT} | set(CONTRACT)
    assert used <= held
    assert len(used) > 25


def test_nothing_else_finds_the_packages_that_make_installs() -> None:
    assert not FOLDER.is_dir() or find_spec("nvshmem") is None
