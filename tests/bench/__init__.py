"""The benchmark suite. From the wheel it is `moe_bench`, and `pytest -p moe_bench` loads its hooks."""

if __package__ == "moe_bench":  # In its own repository the root conftest loads them.
    from .plugin import *  # noqa: F403
