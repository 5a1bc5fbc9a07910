"""Pinning: the process that times stays on the physical cores it was given. Done before jax is imported."""

import os
import sys
from pathlib import Path

from .errors import EnvironmentFault

TOPOLOGY = Path("/sys/devices/system/cpu")


def pin(cores: int | None) -> list[int] | None:
    """Restrict this process to `cores` physical cores (all it may use when None), one thread of each.

    Returns the logical cores that are left, or None where the system has no affinity (macOS, Windows).

    Raises:
      EnvironmentFault: more cores are asked for than there are, or jax was imported first.
    """
    chosen = choose(cores)
    if chosen is not None:
        if "jax" in sys.modules and len(os.sched_getaffinity(0)) != len(chosen):
            raise EnvironmentFault(
                "jax was imported before the process was pinned; its threads stay unpinned"
            )
        restrict(chosen)
    return chosen


def choose(cores: int | None) -> list[int] | None:
    """The logical cores that `pin` restricts to, for a process that only starts those that are pinned."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    available = physical(sorted(os.sched_getaffinity(0)))
    if cores is not None and not 1 <= cores <= len(available):
        raise EnvironmentFault(
            f"--bench-cores={cores}: this process may use 1..{len(available)} physical cores"
        )
    return available[:cores]


def restrict(logical: list[int]) -> None:
    """Restrict this process to these logical cores, where the system has affinity."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, logical)


def physical(logical: list[int]) -> list[int]:
    """One logical core of each physical one, the lowest; all of them where the system does not tell."""
    first: dict[str, int] = {}
    for core in logical:
        try:
            siblings = (TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(core)
        first.setdefault(siblings, core)
    return sorted(first.values())
