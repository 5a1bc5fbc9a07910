"""One mixture-of-experts layer, several interchangeable implementations, one train step."""

from moe.config import Config
from moe.experts import Params, init
from moe.layer import Output, apply
from moe.registry import Choice, Implementation, choose, implementations
from moe.router import Aux, Routing
from moe.train import TrainState, init_state, train_step

__all__ = [
    "Aux",
    "Choice",
    "Config",
    "Implementation",
    "Output",
    "Params",
    "Routing",
    "TrainState",
    "apply",
    "choose",
    "implementations",
    "init",
    "init_state",
    "train_step",
]
