"""The hooks of the benchmark suite; pytest loads benchmark hooks from the root conftest only."""

from tests.bench.plugin import *  # noqa: F403
