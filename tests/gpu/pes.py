"""Processes that are PEs over the double: started once, they then play one scene after the other.

A scene is a function in one of the modules called `*_scenes`; all PEs run it together, each with
its `World`.
"""

import importlib
import mmap
import multiprocessing as mp
import os
import pickle
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from double import Double
from fakegpu import FakeGpu
from install import install
from meeting import CASE, CONTROL, FAILED, MOST, SIZE, OtherFailed
from packages import child_path

#: the modules under test, in the order in which they import each other
MODULES = ("gpu", "nvshmem", "symmetric", "devicemail", "devicewires", "ncclcalls", "nccl")
Mutation = tuple[str, str, str]  # module, what stands there once, what stands there instead


class Asked:
    """Another PE's mail, as this PE asks it; the GPU goes on meanwhile."""

    def __init__(self, world: "World", pe: int) -> None:
        self._world, self._pe = world, pe

    def room(self, *args: Any) -> Any:
        return self._world.ask(self._pe, "room", args)

    def arrived(self, *args: Any) -> Any:
        return self._world.ask(self._pe, "arrived", args)


class World:
    """One scene on one PE; ``gpu`` is a real one, in `check.py`."""

    def __init__(
        self, double: Any, requests: Any, mutation: Mutation | None, gpu: Any = None
    ) -> None:
        self.double = double  # or a mere `Meeting`, with a real GPU
        self.pe, self.n_pes = double.pe, double.n_pes
        self.gpu = gpu or FakeGpu(double)
        self.modules = {name: _module(name, mutation) for name in MODULES}
        self.mail: Any = None
        self.answered: dict[int, Any] = {}
        self._requests = requests
        self._number = 0

    def uid(self) -> bytes:
        """The unique id that the first PE makes."""
        made = self.modules["nvshmem"].new_uid() if self.pe == 0 else b""
        told: list[bytes] = self.double.all_tell(made)
        return told[0]

    def all_tell(self, letter: Any) -> list[Any]:
        return [pickle.loads(one) for one in self.double.all_tell(pickle.dumps(letter))]

    def ask(self, pe: int, name: str, args: Any) -> Any:
        with self.double.lock:
            self._number += 1
            number = self._number
        self._requests[pe].put((self.double.case, self.pe, number, name, args))
        self.double.run_until(lambda: number in self.answered, f"PE {pe}'s answer to {name}")
        answer, failure = self.answered.pop(number)
        if failure is not None:
            raise failure
        return answer


class Office:
    """Answers what other PEs ask of this process, in threads, as a worker does."""

    def __init__(self, pe: int, requests: Any, replies: Any) -> None:
        self.world: World | None = None
        self._replies = replies
        self._threads = ThreadPoolExecutor(4)
        for target, incoming in ((self._serve, requests[pe]), (self._sort, replies[pe])):
            threading.Thread(target=target, args=(incoming,), daemon=True).start()

    def _serve(self, incoming: Any) -> None:
        while True:
            self._threads.submit(self._answer, *incoming.get())

    def _sort(self, incoming: Any) -> None:
        while True:
            case, number, reply = incoming.get()
            if (world := self.world) is not None and world.double.case == case:
                world.answered[number] = reply

    def _answer(self, case: int, asker: int, number: int, name: str, args: Any) -> None:
        world = self.world
        if world is None or world.double.case != case:  # of a scene that has failed
            return
        reply: tuple[Any, BaseException | None]
        try:
            reply = (getattr(world.mail, name)(*args), None)
        except BaseException as failure:
            reply = (None, failure)
        self._replies[asker].put((case, number, reply))


def _module(name: str, mutation: Mutation | None) -> ModuleType:
    """A module under test; with a mutation, all of them are made anew from their sources."""
    dotted = f"dask_redist.{name}"
    module = importlib.import_module(dotted)
    if mutation is None and not getattr(module, "mutated", False):
        return module
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    if mutation is not None and mutation[0] == name:
        assert source.count(mutation[1]) == 1, f"{mutation[1]!r} stands in {name} not just once"
        source = source.replace(mutation[1], mutation[2])
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    module.mutated = mutation is not None  # type: ignore[attr-defined]
    return module


def child(folders: list[str], path: str, pe: int, requests: Any, replies: Any, pipe: Any) -> None:
    """Play scenes until the pipe is closed."""
    sys.path[:0] = folders
    fd = os.open(path, os.O_RDWR)
    memory = mmap.mmap(fd, SIZE)
    os.close(fd)
    control = np.frombuffer(memory, np.uint64, CONTROL // 8)
    office = Office(pe, requests, replies)
    pipe.send("here")
    while True:
        try:
            case, scene, mutation, options, arguments = pipe.recv()
        except EOFError:
            return
        try:
            double = Double(memory, case, pe, **options)
            install(double)
            office.world = world = World(double, requests, mutation)
            module, _, name = scene.rpartition(":")
            play = getattr(importlib.import_module(module), name)
            answer = play(world, **arguments)
            double.host_barrier("the end")
            pipe.send((answer, None))
        except BaseException as failure:
            gave_up = isinstance(failure, OtherFailed)
            if not gave_up:
                control[FAILED] = case
            pipe.send((None, "" if gave_up else traceback.format_exc()))


class Crew:
    """The processes."""

    def __init__(self, folders: list[str]) -> None:
        self._fd = os.memfd_create("heaps")
        os.ftruncate(self._fd, SIZE)
        self._memory = mmap.mmap(self._fd, SIZE)
        self._control = np.frombuffer(self._memory, np.uint64, CONTROL // 8)
        self._case = 0
        context = mp.get_context("spawn")
        requests = [context.Queue() for _ in range(MOST)]
        replies = [context.Queue() for _ in range(MOST)]
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._pipes = []
        for pe in range(MOST):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=child, args=(folders, path, pe, requests, replies, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
        for pipe in self._pipes:
            assert pipe.poll(60), "a PE did not start"
            pipe.recv()

    def play(
        self,
        scene: str,
        n_pes: int,
        seed: int = 0,
        mutation: Mutation | None = None,
        options: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Each PE's answer; fails with the tracebacks of the PEs that failed."""
        self._case += 1
        self._control[:] = 0
        self._control[CASE] = self._case
        options = {"n_pes": n_pes, "seed": seed} | (options or {})
        for pipe in self._pipes[:n_pes]:
            pipe.send((self._case, scene, mutation, options, arguments))
        answers = []
        deadline = time.monotonic() + 60
        for pe, pipe in enumerate(self._pipes[:n_pes]):
            assert pipe.poll(max(0.0, deadline - time.monotonic())), f"PE {pe} does not answer"
            answers.append(pipe.recv())
        faults = [f"PE {pe}: {fault}" for pe, (_, fault) in enumerate(answers) if fault]
        assert not faults, "\n".join(faults)
        return [answer for answer, _ in answers]


@cache
def crew() -> Crew:
    """The one crew of these tests; its processes are daemons, and end with this one."""
    return Crew(child_path().split(os.pathsep))
