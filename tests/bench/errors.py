"""The suite's own faults: one family, so that a caller can catch them all, or only the kind it can answer."""


class BenchError(Exception):
    """A fault of the suite or of its use, never of the measured code.

    The message names the value, the rule and the way out.
    """


class GridError(BenchError):
    """The asked-for grid cannot be built: an unknown name, a value out of range, or no cell left."""


class BaselineError(BenchError):
    """A stored record cannot be read, written or trusted (integrity)."""


class NoGrid(BaselineError):
    """This backend and JAX have no baseline of this grid."""


class NoBaseline(NoGrid):
    """This backend and JAX have no baseline at all: nothing is damaged, there is nothing to compare with."""


class EnvironmentFault(BenchError):
    """The machine lacks what the run needs: a backend, cores, memory."""
