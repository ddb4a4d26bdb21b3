"""Processes that are PEs meet in one mapped file: they wait for each other, and tell each other.

What a PE's GPU does meanwhile is `_step`'s business: here there is none, or a real one.
"""

import mmap
import threading
import time
from collections.abc import Callable

import numpy as np

HEAP = 8 << 20  # bytes a PE
CONTROL = 1 << 16
LETTERS = 1 << 16  # bytes a PE for what it tells all
MOST = 5  # PEs
SIZE = CONTROL + MOST * (HEAP + LETTERS)

FAILED, CASE, HOST = 0, 1, 16  # numbers in the control page


class Misuse(Exception):
    """What the real library answers with a hang, an exit, or wrong data."""


class Stuck(Misuse):
    """A wait that nothing will end."""


class OtherFailed(Exception):
    """Another PE has failed, so this one gives up."""


class Meeting:
    """The place of one PE.

    Parameters
    ----------
    memory
        The file that all PEs map.
    case
        A number that only rises.
    pe, n_pes
        Which of how many.
    patience
        Seconds without any progress after which a wait is taken to be endless.
    """

    def __init__(
        self, memory: mmap.mmap, case: int, pe: int, n_pes: int, patience: float = 30.0
    ) -> None:
        self.case, self.pe, self.n_pes = case, pe, n_pes
        self._patience = patience
        self._memory = memory
        bytes_of_all = np.frombuffer(memory, np.uint8)
        self._base: int = bytes_of_all.ctypes.data
        self.control = bytes_of_all[:CONTROL].view(np.uint64)
        self.letters = bytes_of_all[CONTROL : CONTROL + MOST * LETTERS].reshape(MOST, LETTERS)
        self.lock = threading.RLock()

    def run_until(self, done: Callable[[], bool], words: str) -> None:
        """Wait until something has come about; the GPU goes on meanwhile."""
        deadline = time.monotonic() + self._patience
        while True:
            with self.lock:
                if done():
                    return
                moved = self._step()
            self.give_up_if_failed()
            if moved:
                deadline = time.monotonic() + self._patience
            elif time.monotonic() > deadline:
                raise Stuck(f"PE {self.pe} waits for {words}{self._where()}")
            else:
                time.sleep(0.0003)

    def _step(self) -> bool:
        """Let the GPU go on; whether it did."""
        return False

    def _where(self) -> str:
        """Where the GPU stands, in words."""
        return ""

    def give_up_if_failed(self) -> None:
        if self.control[FAILED] >= self.case or self.control[CASE] != self.case:
            raise OtherFailed(f"PE {self.pe} gives up: another one has failed")

    def host_barrier(self, words: str) -> None:
        """Wait on the host for all PEs; the GPU goes on meanwhile."""
        mine = HOST + self.pe
        self.control[mine] += np.uint64(1)
        count = int(self.control[mine])
        self.run_until(
            lambda: all(self.control[HOST + k] >= count for k in range(self.n_pes)),
            f"all PEs in {words}",
        )

    def all_tell(self, letter: bytes) -> list[bytes]:
        """What each PE tells all others."""
        size = len(letter)
        assert size + 8 <= LETTERS
        self.letters[self.pe, :8].view(np.uint64)[0] = size
        self.letters[self.pe, 8 : 8 + size] = np.frombuffer(letter, np.uint8)
        self.host_barrier("telling")
        sizes = [int(self.letters[k, :8].view(np.uint64)[0]) for k in range(self.n_pes)]
        told = [self.letters[k, 8 : 8 + n].tobytes() for k, n in enumerate(sizes)]
        self.host_barrier("hearing")
        return told
