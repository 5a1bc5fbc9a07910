"""The other side: the Mixtral experts of Hugging Face transformers on PyTorch, eager and grouped_mm.

The router is ours, in float32: theirs scores bfloat16 rows in bfloat16 and sends some tokens elsewhere, so
that outputs could not be compared. Both forms get the same indices and weights.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from moe.adam import LEARNING_RATE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Layer(torch.nn.Module):
    """Router and experts, with the weights of one cell.

    Args:
      inputs: router (d, E), gate and up (E, d, h), down (E, h, d), float32.
      top_k: experts a token.
      form: eager or grouped_mm.
      dtype: of the products; `kept` is that of the parameters.
    """

    def __init__(self, inputs: Any, top_k: int, form: str, dtype: torch.dtype, kept: torch.dtype) -> None:
        super().__init__()
        experts, width, hidden = inputs["gate"].shape
        config = MixtralConfig(
            hidden_size=width, intermediate_size=hidden, num_local_experts=experts, hidden_act="silu"
        )
        config._experts_implementation = form
        self.top_k, self.dtype = top_k, dtype
        self.router = torch.nn.Parameter(torch.from_numpy(inputs["router"].copy()))
        self.experts = MixtralExperts(config).to(kept)
        both = np.concatenate((inputs["gate"], inputs["up"]), axis=2).swapaxes(1, 2)
        with torch.no_grad():
            self.experts.gate_up_proj.copy_(torch.from_numpy(both))
            self.experts.down_proj.copy_(torch.from_numpy(inputs["down"].swapaxes(1, 2)))
        self._casts = dtype != kept and form == "grouped_mm"
        self._autocasts = dtype != kept and form == "eager"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, chosen = torch.topk(x.float() @ self.router, self.top_k, dim=-1)
        weights = torch.softmax(best, dim=-1).to(x.dtype)
        if self._casts:  # grouped_mm has no autocast: cast by hand what eager's products cast.
            cast = {name: leaf.to(self.dtype) for name, leaf in self.experts.named_parameters()}
            y: torch.Tensor = torch.func.functional_call(self.experts, cast, (x, chosen, weights))
            return y
        how: Any = torch.autocast("cpu", self.dtype) if self._autocasts else contextlib.nullcontext()
        with how:
            mixed: torch.Tensor = self.experts(x, chosen, weights)
            return mixed


class Torch:
    """See `worker.Side`."""

    def __init__(self, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._cell: dict[str, Any] = {}
        self._inputs: Any = None
        self._runs: dict[str, Callable[[], Any]] = {}

    def load(self, cell: dict[str, Any], inputs: str) -> None:
        self._cell, self._runs = cell, {}
        self._inputs = dict(np.load(inputs))

    def prepare(self, arm: str) -> None:
        layer, x = self._made(arm), self._x()
        if self._cell["op"] == "forward":
            run: Callable[[], Any] = torch.inference_mode()(lambda: layer(x))
        else:
            how = arm.split()[-1]
            adam = torch.optim.Adam(layer.parameters(), lr=LEARNING_RATE, **{how: True})

            def run() -> None:
                adam.zero_grad(set_to_none=True)
                layer(x).float().square().mean().backward()
                adam.step()

        self._runs[arm] = run

    def output(self, arm: str, path: str) -> None:
        with torch.inference_mode():
            np.save(path, self._made(arm)(self._x()).float().numpy())

    def run(self, arm: str) -> None:
        self._runs[arm]()

    def _made(self, arm: str) -> Layer:
        cell = self._cell
        kinds = (DTYPES[cell["dtype"]], DTYPES[cell["param_dtype"]])
        return Layer(self._inputs, cell["top_k"], arm.split()[1], *kinds)

    def _x(self) -> torch.Tensor:
        return torch.from_numpy(self._inputs["x"]).to(DTYPES[self._cell["dtype"]])
