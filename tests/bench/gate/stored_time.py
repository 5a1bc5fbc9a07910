"""Tier 4: stored time as a loose trip-wire, for what no program holds: Python around it, retracing, the machine.

It never decides: a cell that trips it is raced against its stored program, and that decides.
"""

from typing import Any

from ..environment import differing

SLOWER = 1.3
"""Share of the matmul's rate then over now that trips the wire: a false trip costs a race and no more."""
OUTSIDE = 1.2
"""Ratio to the stored program from which the call is slower than an equal program explains."""
COMPARABLE = ("cpu", "cores", "device_kind", "jax", "jaxlib")
"""Fields of the environment that must be equal."""


def not_comparable(today: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """The fields of two environments because of which stored time has no say."""
    return differing(today, stored, COMPARABLE)


def tripped(
    record: dict[str, Any],
    stored: dict[str, Any],
    environment: dict[str, Any],
    stored_environment: dict[str, Any],
) -> bool:
    """Whether a record's `gemm_fraction` fell by more than SLOWER, in comparable environments."""
    was, now = stored.get("gemm_fraction"), record.get("gemm_fraction")
    if not was or not now or not_comparable(environment, stored_environment):
        return False
    return was / now > SLOWER
