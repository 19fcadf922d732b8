"""FlashAttention-4's forward kernel as a `Subject`: with what its package chooses for the problem.

That is asked of the package with tensors that are not there; the small problems that are then run
must get the same kernel, or the model refuses: some choices depend on the number of work tiles.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

from fa4core.compile.targets import TARGETS
from fa4core.emulator.host.facade import cuda_facade
from fa4core.emulator.session import Session, emulator
from fa4core.plan.problem import Problem
from fa4core.report.peer import fa4_arguments, fa4_asked_anew, fa4_options, import_fa4
from fa4core.timing.subject import Run, Subject, largest, small_problem, tensors
from fa4core.variant import Variant
from primitives.schedule import Schedule


def fa4(variant: Variant, problem: Problem, target: str, ctas: int | None = None) -> Subject:
    """FlashAttention-4's kernel for a call.

    Args:
        ctas: That share a work tile; what its package takes unless given.

    Raises:
        ModuleNotFoundError, NotImplementedError: It is not installed, or can't do it.
    """
    arguments, wanted = fa4_arguments(variant), ctas
    interface = import_fa4()
    with pairs(interface, wanted):
        options = fa4_options(variant, problem, TARGETS[target])
    if target == "sm90":
        rows, keys, ctas, persistent = options["tile_m"], options["tile_n"], 1, False
    else:
        ctas = 2 if options["use_2cta_instrs"] else 1
        rows = options["m_block_size"] * options["q_stage"] * ctas
        keys, persistent = options["n_block_size"], options["is_static_persistent"]
    if wanted not in (None, ctas):
        raise NotImplementedError(f"FlashAttention-4 has no kernel with {wanted} CTAs for this")
    packed = options["qhead_per_kvhead"] if options["pack_gqa"] else 1
    if rows % packed:
        raise NotImplementedError(
            f"FlashAttention-4 packs {packed} query heads into {rows} rows, which do not hold a "
            "whole number of queries; a group that divides them is modelled"
        )
    plain = frozenset((n, v) for n, v in options.items() if _plain(v))
    kernels = _KERNELS.setdefault((target, ctas, plain), {})

    def run(queries: int, keys: int, heads: int, sms: int) -> Run:
        small = small_problem(problem, queries, keys, heads, packed)
        # Its grid is compiled for a number of SMs: those of one cluster serve every launch.
        with (
            emulated(target, ctas) as session,
            _with_options(options, kernels),
            pairs(interface, wanted),
        ):
            interface.flash_attn_func(*tensors(small), return_lse=True, **arguments)
        return largest(session)

    unequal = "causal" in arguments and "window_size" not in arguments
    schedule = Schedule(
        coordinates="packed_gqa" if packed > 1 else "heads",
        source="persistent" if persistent else "one_tile",
        order="longest_first" if unequal else "in_order",
        l2_sections=unequal,
        ctas=ctas,
    )
    return Subject(
        title="fa4" if wanted is None else f"fa4, {ctas} CTA{'s' if ctas > 1 else ''}",
        run=run,
        schedule=schedule,
        rows=rows // packed,
        ctas=ctas,
        packed=packed,
        block=keys,
        several=target != "sm90" and not persistent,
    )


@contextlib.contextmanager
def pairs(interface: Any, ctas: int | None) -> Iterator[None]:
    """FlashAttention-4 takes no pairs of CTAs if `ctas` is 1."""
    allowed = interface.utils._fa_disable_2cta_enabled if ctas is None else ctas == 1
    with mock.patch.object(interface.utils, "_fa_disable_2cta_enabled", allowed):
        yield


#: Compiled before, by target, SMs and what they were made with.
_KERNELS: dict[tuple, dict[Any, Any]] = {}


@contextlib.contextmanager
def _with_options(options: dict[str, Any], kernels: dict[Any, Any]) -> Iterator[None]:
    """FlashAttention-4 makes its forward kernels with these options, or not at all.

    Args:
        kernels: Those compiled before, and then those compiled now.
    """

    def check(given: dict[str, Any]) -> None:
        other = [n for n in given if _plain(given[n]) and given[n] != options[n]]
        if other:
            raise NotImplementedError(
                "FlashAttention-4 takes another kernel for the few work tiles that are replayed: "
                + ", ".join(f"{n}={given[n]!r} and not {options[n]!r}" for n in other)
            )

    with fa4_asked_anew(check, kernels):
        yield


@contextlib.contextmanager
def emulated(target: str, sms: int) -> Iterator[Session]:
    """FlashAttention-4 runs in the emulator, compiled with line information."""
    with (
        emulator(
            target, seed=1, detect="none", num_sms=sms, record=False, line_info=True, trace=True
        ) as session,
        cuda_facade(session.target, session.num_sms),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Argument .* cannot be converted")  # by the DSL
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield session


def _plain(value: Any) -> bool:
    """Whether it is what it says: score mods are functions, new ones in each call."""
    return isinstance(value, (bool, int, str))
