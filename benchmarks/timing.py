"""Times GPU functions against each other: interleaved, so that clocks and heat hit all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import attrs
import torch

ROUNDS = 9
LEAST_MS = 2.0  # of one timed stretch
CYCLES = 500_000  # that the GPU spins behind it, to tell its clock


@attrs.frozen
class Time:
    """Milliseconds of one call: the median over rounds, and their spread (75 % - 25 %).

    Attributes:
        ghz: The clock of the SMs right behind it, median over rounds.
    """

    median: float
    spread: float
    ghz: float


def _stretch(function: Callable[[], object], calls: int) -> tuple[torch.cuda.Event, ...]:
    begin, end, spun = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda._sleep(CYCLES)  # counts clock cycles of an SM
    spun.record()
    return begin, end, spun


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int = ROUNDS
) -> dict[str, Time]:
    """Time of each function; in each round, each runs for a few milliseconds.

    Rounds begin with another one in turn: the clock is lower behind whatever needed much power.
    """
    calls = {}
    for name, function in functions.items():
        for _ in range(2):
            function()
        begin, end, _ = _stretch(function, 3)
        torch.cuda.synchronize()
        calls[name] = max(1, round(LEAST_MS / max(begin.elapsed_time(end) / 3, 1e-3)))
    seen: dict[str, list[float]] = {name: [] for name in functions}
    clocks: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for round_ in range(rounds):
        first = round_ % len(names)
        order = names[first:] + names[:first]
        events = {name: _stretch(functions[name], calls[name]) for name in order}
        torch.cuda.synchronize()
        for name, (begin, end, spun) in events.items():
            seen[name].append(begin.elapsed_time(end) / calls[name])
            clocks[name].append(CYCLES / end.elapsed_time(spun) / 1e6)
    return {name: _time(times, clocks[name]) for name, times in seen.items()}


def _time(times: list[float], clocks: list[float]) -> Time:
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [0.0, 0.0, 0.0]
    return Time(statistics.median(times), quarters[2] - quarters[0], statistics.median(clocks))
