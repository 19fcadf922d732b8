"""A variant and a problem as the command line names them: shared by the commands that take both.

`@takes_problem` adds the argument, the options of the problem and what else a variant's own factory
accepts; `requested` makes the values, or ends with a message that says what is accepted.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import itertools
import pkgutil
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import click

if TYPE_CHECKING:
    from fa4core.plan.problem import Problem
    from fa4core.variant import Variant

DTYPES = ("bfloat16", "float16", "float32", "float64")
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}
#: Errors that say what was given and what is accepted, so that their message is all one needs.
REFUSALS = (ValueError, TypeError, IndexError, ImportError, OSError, NotImplementedError)
_OPTIONS = (
    click.argument("variant"),
    click.argument("options", nargs=-1, type=click.UNPROCESSED),
    click.option("--seqlen", type=click.IntRange(0), default=8192, show_default=True),
    click.option("--seqlen-q", type=click.IntRange(0), help="Queries, if not as many as keys."),
    click.option("--seqlen-k", type=click.IntRange(0), help="Keys, if not as many as queries."),
    click.option("--batch", type=click.IntRange(1), default=1, show_default=True),
    click.option(
        "--lengths", help="Packed sequences of these lengths, e.g. 8192,256,256, and no batch."
    ),
    click.option("--heads", type=click.IntRange(1), default=16, show_default=True),
    click.option("--kv-heads", type=click.IntRange(1), help="As many as heads if left out."),
    click.option(
        "--head-dim", type=click.IntRange(1), help="128, or what the variant's module says."
    ),
    click.option("--head-dim-v", type=click.IntRange(1), help="As head-dim if left out."),
    click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True),
)


def takes_problem(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function the argument and options that `requested` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def requested(
    variant: str,
    options: tuple[str, ...],
    seqlen: int,
    seqlen_q: int | None,
    seqlen_k: int | None,
    batch: int,
    lengths: str | None,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    head_dim_v: int | None,
    dtype: str,
) -> tuple[Variant, Problem]:
    """The variant and the problem.

    Raises:
        click.ClickException, ValueError, TypeError, IndexError: Saying what is accepted.
    """
    import torch

    from fa4core.plan.problem import Problem

    if variant.startswith("-"):
        raise click.UsageError(f"{variant} stands before the variant; name the variant first")
    module, factory = _factory(variant)
    own_dims: dict[str, int] = vars(module)
    d = head_dim or own_dims.get("HEAD_DIM", 128)
    d_v = head_dim_v or head_dim or own_dims.get("HEAD_DIM_V", d)
    packed = None if lengths is None else _lengths(lengths)
    if packed is not None:
        batch, seqlen, seqlen_q, seqlen_k = len(packed), max(packed), None, None
    seqlen_q, seqlen_k = (seqlen if n is None else n for n in (seqlen_q, seqlen_k))
    sizes = {"seqlen": seqlen, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "batch": batch}
    known = {**sizes, "heads": heads, "kv_heads": kv_heads or heads, "head_dim": d}
    arguments = _arguments(variant, factory, options, known)
    if heads % (kv_heads or heads):
        raise click.BadParameter(
            f"{heads} query heads on {kv_heads} KV heads; the query heads must be a multiple",
            param_hint="--kv-heads",
        )
    made = _checked_variant(variant, factory(**arguments))
    problem = Problem(
        batch=batch,
        heads_q=heads,
        heads_kv=kv_heads or heads,
        head_dim=d,
        head_dim_v=d_v,
        seqlens_q=packed or (seqlen_q,) * batch,
        seqlens_k=packed or (seqlen_k,) * batch,
        starts_q=_starts(packed),
        starts_k=_starts(packed),
        dtype=getattr(torch, dtype),
    )
    return made, problem


def _lengths(text: str) -> tuple[int, ...]:
    """Of packed sequences."""
    try:
        found = tuple(int(n) for n in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise click.BadParameter(
            f"{text!r}; numbers of at least 0 with commas between them are accepted, e.g. "
            "8192,256,256",
            param_hint="--lengths",
        )
    return found


def _starts(lengths: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Where each of some packed sequences starts."""
    if lengths is None:
        return None
    return tuple(itertools.accumulate(lengths, initial=0))[:-1]


def _checked_variant(name: str, made: object) -> Variant:
    """What a factory returned, if it is a variant."""
    from fa4core.variant import Variant
    from primitives.mask.core import Mask
    from primitives.score.core import ScoreMod

    if isinstance(made, Variant):
        return made
    part = "mask" if isinstance(made, Mask) else "score" if isinstance(made, ScoreMod) else None
    hint = f"; return Variant({part}=...)" if part else ""
    shown = "None" if made is None else f"a {type(made).__name__}"
    raise click.BadParameter(
        f"{name} returned {shown}; a function that returns a fa4core.Variant is accepted{hint}",
        param_hint="VARIANT",
    )


# ------------------------------------------------------------------------ a variant's factory


def _factory(name: str) -> tuple[types.ModuleType, Callable[..., Any]]:
    """The module and the function that `name` means."""
    path, _, function = name.partition(":")
    sys.path.insert(0, "")  # a module in the current directory, as with `python -m`
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            raise click.ClickException(f"importing {path} failed: {error}") from error
        near = difflib.get_close_matches(path.rpartition(".")[2], prebuilt(), n=1)
        hint = f" Did you mean variants.{near[0]}?" if near else ""
        raise click.BadParameter(
            f"there is no module {path!r}.{hint} `python -m fa4core variants` lists the prebuilt "
            "ones; module:function names one of your own",
            param_hint="VARIANT",
        ) from error
    finally:
        sys.path.remove("")
    function = function or path.rpartition(".")[2]
    made = getattr(module, function, None)
    if not callable(made):
        raise click.BadParameter(
            f"{path} has no function {function!r}; name one as {path}:function",
            param_hint="VARIANT",
        )
    return module, made


def prebuilt() -> list[str]:
    """Names of the prebuilt variants' modules."""
    if importlib.util.find_spec("variants") is None:
        return []
    package = importlib.import_module("variants")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name[0] != "_")


@attrs.frozen
class _Parameter:
    """One parameter of a factory as an option."""

    name: str
    kind: Any
    default: Any

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    def __str__(self) -> str:
        shown = "" if self.default is inspect.Parameter.empty else f" (default {self.default})"
        kind = "" if self.is_flag else f" {_kind_name(self.kind)}"
        return f"{self.option}{kind}{shown}"


def factory_parameters(factory: Callable[..., Any]) -> list[_Parameter]:
    """What a factory takes, as options."""
    try:
        hints = typing.get_type_hints(factory)
    except NameError:  # an annotation that only exists for type checkers
        hints = {}
    return [
        _Parameter(p.name, hints.get(p.name, Any), p.default)
        for p in inspect.signature(factory).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]


def _arguments(
    variant: str, factory: Callable[..., Any], options: Sequence[str], known: dict[str, Any]
) -> dict[str, Any]:
    """The factory's arguments: sizes that it asks for, and what the options say."""
    parameters = {p.name: p for p in factory_parameters(factory)}
    found = {name: value for name, value in known.items() if name in parameters}
    rest = list(options)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            raise click.UsageError(f"{token!r} belongs to no option; {_accepted(variant, factory)}")
        text, equals, value = token[2:].partition("=")
        name = text.replace("-", "_")
        negated = name.removeprefix("no_")
        if name not in parameters and negated in parameters and parameters[negated].is_flag:
            found[negated] = False
            continue
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = f" Did you mean {parameters[near[0]].option}?" if near else ""
            raise click.UsageError(f"no option {token!r}.{hint} {_accepted(variant, factory)}")
        parameter = parameters[name]
        if parameter.is_flag and not equals:
            found[name] = True
            continue
        if not equals:
            if not rest:
                raise click.UsageError(f"{parameter.option} needs a value: {parameter}")
            value = rest.pop(0)
        found[name] = _converted(parameter, value)
    for p in parameters.values():
        if p.default is inspect.Parameter.empty and p.name not in found:
            raise click.UsageError(f"{variant} needs {p}; {_accepted(variant, factory)}")
    return found


def _accepted(variant: str, factory: Callable[..., Any]) -> str:
    listed = ", ".join(map(str, factory_parameters(factory)))
    own = f"{variant} accepts {listed}" if listed else f"{variant} accepts no options of its own"
    return f"{own}; see `--help` for the rest"


def _converted(parameter: _Parameter, text: str) -> Any:
    for kind in _alternatives(parameter.kind):
        try:
            return _convert(kind, text)
        except (ValueError, SyntaxError):
            continue
    raise click.BadParameter(
        f"{text!r} is no {_kind_name(parameter.kind)}", param_hint=parameter.option
    )


def _alternatives(kind: Any) -> list[Any]:
    """The members of a union, numbers before text; the kind itself if it is none."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [m for k in typing.get_args(kind) for m in _alternatives(k)]
        return sorted(members, key=lambda k: k is str)
    return [kind]


def _convert(kind: Any, text: str) -> Any:
    import torch

    if kind is type(None):
        if text.lower() != "none":
            raise ValueError(text)
        return None
    if kind is bool:
        return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
    if kind in (int, float, str):
        return kind(text.replace("_", "")) if kind is not str else text
    if typing.get_origin(kind) is typing.Literal:
        if text not in typing.get_args(kind):
            raise ValueError(text)
        return text
    if kind is torch.Tensor:
        return torch.tensor(_listed(text))
    if typing.get_origin(kind) in (tuple, list, Sequence):
        return tuple(_listed(text))
    return ast.literal_eval(text)  # no annotation: a Python literal


def _listed(text: str) -> list:
    value = ast.literal_eval(text if text.startswith(("[", "(")) else f"[{text}]")
    return list(value)


def _kind_name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(_kind_name(k) for k in _alternatives(kind))
    if kind is type(None):
        return "none"
    if typing.get_origin(kind) in (tuple, list, Sequence):
        return "N,N,..."
    name = "VALUE" if kind is Any else getattr(kind, "__name__", str(kind))
    return {"int": "INT", "float": "FLOAT", "str": "TEXT", "Tensor": "N,N,..."}.get(name, name)
