"""`emulator`: a block of code in which CuTe DSL kernels run on the CPU.

    with emulator(target="sm100", seed=7, detect="all") as session:
        compiled(q, k, v, out)          # torch CPU tensors
    print(session.statistics)

Everything compiled inside the block is compiled for the target and linked against the emulator's
run-time library; functions compiled before it must come from `compile_for_emulator`. Global memory
lives across the launches of a session. Used by tests, by ``backend="emulator"`` and by the command
line; it knows no kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch

from fa4core.compile.cross import Compiled, cross_compile
from fa4core.compile.environment import dsl_settings, exclusive
from fa4core.compile.targets import Target, resolve
from fa4core.emulator.host import calls, library, modules
from fa4core.emulator.host.disguise import disguise, visible
from fa4core.emulator.host.memory import Memory, WatchTorch
from fa4core.emulator.host.rewrite import rewrite
from fa4core.emulator.launch import Allocation, Launch, Statistics
from fa4core.emulator.machine import Machine

_open_session: Session | None = None


@attrs.frozen
class _Step:
    """One launch of a session and the memory it started from."""

    launch: Launch
    contents: tuple[tuple[Allocation, bytes], ...]


class Session:
    """What happened inside one `emulator` block."""

    def __init__(
        self,
        target: Target,
        seed: int,
        detect: Any,
        num_sms: int,
        record: bool,
        **notes: bool,
    ):
        self.target = target
        self.seed = seed
        self.num_sms = num_sms
        self._detect = detect
        self._record = record
        self._notes = notes  # what else a machine writes down
        self.machine = self._new_machine(seed)
        self.memory = Memory(self.machine, keep=record)
        self._launches: list[Launch] = []
        self._steps: list[_Step] = []
        self._statistics: list[Statistics] = []
        self._transforms: list[Callable[[Launch], Launch]] = []
        self._finish: Callable[[], None] = lambda: None  # raises what went wrong in a launch

    def _new_machine(self, seed: int) -> Machine:
        return Machine(self.target.name, seed, self._detect, self.num_sms, **self._notes)

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(self._launches)

    @property
    def statistics(self) -> tuple[Statistics, ...]:
        """One per launch, in order."""
        return tuple(self._statistics)

    def register(
        self, tensor: torch.Tensor, name: str = "", initialised: bool | None = None
    ) -> torch.Tensor:
        """Name a tensor in reports, or say that its contents count as unwritten. Tensors that are
        passed to compiled functions need no call; raw pointers hidden from torch do."""
        self.memory.exported(tensor, name, initialised)
        return tensor

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call host code that was loaded, not compiled, here (a TVM-FFI function)."""
        with exclusive:
            try:
                function(*map(visible, arguments))
            finally:
                self._finish()

    def transform(self, rule: Callable[[Launch], Launch]) -> None:
        """Pass every later launch through `rule` first (mutation tests change its PTX)."""
        self._transforms.append(rule)

    def replay(self, seed: int | None = None) -> tuple[Statistics, ...]:
        """Run the recorded launches again, from the memory each started from (None: same seed).

        The tensors are overwritten with the replayed results. Raises like the first run did.
        """
        if not self._record:
            raise RuntimeError("replay needs emulator(..., record=True)")
        machine = self._new_machine(self.seed if seed is None else seed)
        statistics = []
        registered: dict[int, Allocation] = {}
        for step in self._steps:
            for allocation, data in step.contents:
                if registered.get(allocation.address) != allocation:
                    registered[allocation.address] = allocation
                    machine.register(allocation)
                ctypes.memmove(allocation.address, data, len(data))
            statistics.append(machine.launch(step.launch))
        return tuple(statistics)

    def _launch(self, launch: Launch) -> None:
        for rule in self._transforms:
            launch = rule(launch)
        self.memory.sweep()
        self._launches.append(launch)
        if self._record:
            self._steps.append(_Step(launch, self.memory.changes()))
        self._statistics.append(self.machine.launch(launch))


@contextlib.contextmanager
def emulator(
    target: str | Target = "sm100",
    seed: int = 0,
    detect: str | Iterable[str] = "all",
    *,
    num_sms: int | None = None,
    record: bool = True,
    line_info: bool = False,
    timeline: bool = False,
    trace: bool = False,
) -> Iterator[Session]:
    """Run CuTe DSL kernels on the CPU inside the block.

    target: "sm100", "sm103" or "sm90". seed: chooses the order in which warps run and in which
    asynchronous operations take effect; one seed gives one result, bit for bit. detect: "all",
    "none" or names out of `fa4core.emulator.launch.DETECTORS`. num_sms: what kernels are told,
    default the target's; a small number makes persistent kernels loop. record: keep what
    `Session.replay` needs. line_info: compile with source lines, so that reports name them.
    timeline: fill `Statistics.timeline`. trace: fill `Statistics.trace`.

    Raises `EmulatorError` from the call of the compiled function when a detector fires.
    """
    with contextlib.ExitStack() as block:
        exclusive.acquire()  # to open; and, by the callbacks, to close
        block.callback(exclusive.release)
        session = _opened(
            block, target, seed, detect, num_sms, record, line_info, timeline=timeline, trace=trace
        )
        block.callback(exclusive.acquire)
        exclusive.release()
        yield session


def _opened(
    block: contextlib.ExitStack,
    target: str | Target,
    seed: int,
    detect: str | Iterable[str],
    num_sms: int | None,
    record: bool,
    line_info: bool,
    **notes: bool,
) -> Session:
    """A session that `block` closes."""
    global _open_session  # noqa: PLW0603  (the run-time library has one callback)
    if _open_session is not None:
        raise RuntimeError(
            "an emulator session is open already, in this thread or another; sessions do not nest. "
            "Make the calls in that one, or close it before"
        )
    if num_sms is not None and (not isinstance(num_sms, int) or num_sms < 1):
        raise ValueError(f"num_sms={num_sms!r}; a positive int is accepted, or None")
    chosen = resolve(target)
    sms = num_sms or chosen.num_sms
    detectors = detect if isinstance(detect, str) else frozenset(detect)
    session = Session(chosen, seed, detectors, sms, record, **notes)
    listener = calls.Listener(session._launch, session.machine.parameters)

    def finish() -> None:
        if error := listener.take_error():
            raise error from None

    session._finish = finish
    block.enter_context(
        dsl_settings(chosen, library.runtime_library(), rewrite, modules.remember, line_info)
    )
    block.enter_context(disguise(chosen, sms, session.memory.exported, finish))
    block.enter_context(WatchTorch(session.memory))
    calls.describe_device(chosen, sms)
    listener.open()
    block.callback(listener.close)
    _open_session = session
    block.callback(_close)
    return session


def current_session() -> Session | None:
    """The session of the block that is open, or None."""
    return _open_session


def _close() -> None:
    global _open_session  # noqa: PLW0603
    _open_session = None


def compile_for_emulator(
    function: Callable[..., Any],
    *args: Any,
    target: str | Target = "sm100",
    options: str = "",
    **kwargs: Any,
) -> Compiled:
    """Like `cross_compile`, for calls inside a later `emulator` block of the same target."""
    compiled = cross_compile(
        function,
        *args,
        target=target,
        options=options,
        runtime=library.runtime_library(),
        rewrite=rewrite,
        **kwargs,
    )
    modules.remember(compiled.function)
    return compiled
