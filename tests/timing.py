"""pytest-benchmark's own fixture without a test around it, on a clock that the tests turn."""

from types import SimpleNamespace

from pytest_benchmark.fixture import BenchmarkFixture
from pytest_benchmark.utils import NameWrapper


class Clock:
    """A clock that moves only when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def fixture(timer, stats, disabled=False):
    """A benchmark fixture whose statistics are appended to `stats`."""
    return BenchmarkFixture(
        SimpleNamespace(name="cell", nodeid="cell"),
        disable_gc=False,
        timer=NameWrapper(timer),
        min_rounds=5,
        min_time=5e-6,
        max_time=1.0,
        precision=None,
        confidence=None,
        warmup=False,
        warmup_iterations=1,
        calibration_precision=10,
        add_stats=stats.append,
        logger=None,
        warner=None,
        disabled=disabled,
        cprofile=None,
        cprofile_loops=None,
        cprofile_dump=None,
    )
