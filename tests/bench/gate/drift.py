"""Drift: what differs from the baseline's run besides the change under test. Only code drift is blamed on it."""

from collections.abc import Mapping
from typing import Any

from ..environment import differing
from . import deterministic, limits
from .evidence import Evidence
from .verdict import Drift

COMPILED_BY = ("jax", "jaxlib", "backend", "device_kind", "xla_flags", "x64", "matmul_precision")
"""Fields of the environment that decide what a program compiles to."""
TIMED_BY = ("cpu", "cores")
"""Those that decide how long it takes."""
SAME_FIGURES = "same bytes and flops"


def moved_first(found: list[Drift]) -> list[Drift]:
    """Cells whose bytes or flops moved, then those of which only the program's text did."""
    return sorted(found, key=lambda drift: drift.text.endswith(SAME_FIGURES))


def compiled_alike(today: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Whether two environments compile one program to the same bytes."""
    return not differing(today, stored, COMPILED_BY)


def of_environment(today: dict[str, Any], stored: dict[str, Any]) -> list[Drift]:
    """A line for each field that differs."""
    return [
        Drift("environment", f"{name}: {stored.get(name)} -> {today.get(name)}")
        for name in differing(today, stored, (*COMPILED_BY, *TIMED_BY))
    ]


def of_cell(
    identity: str,
    seen: Evidence,
    today: Mapping[str, Any],
    stored: dict[str, Any],
    same_jax: bool,
    settings: tuple[limits.Limit, ...],
) -> list[Drift]:
    """Code or JAX drift where the program is another; compiler drift where one program got other figures."""
    if seen.against is None or seen.digest is None:
        return []
    found = []
    if not seen.same:
        figures = seen.figures or {}
        moved = [
            f"{name} {deterministic.change(figures[name], today[name])}"
            for name in deterministic.METRICS
            if None not in (figures.get(name), today.get(name)) and figures[name] != today[name]
        ]
        what = "; ".join(moved) or (SAME_FIGURES if figures else "the stored one was not compiled here")
        found.append(Drift("code" if same_jax else "jax", f"another program: {what}", identity))
    compiled_now = today if seen.same else seen.figures
    if compiled_now is not None:
        worse, better = deterministic.compare({**stored, **compiled_now}, stored, settings)
        if worse or better:
            found.append(Drift("compiler", f"the stored program: {'; '.join(worse + better)}", identity))
    return found
