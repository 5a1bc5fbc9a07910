"""What a layer is: its sizes and its routing rule, checked once."""

import dataclasses
import math
import numbers
import warnings

# Index arithmetic inside the implementations is int32.
INDEX_LIMIT = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape and the routing rule of one layer.

    Args:
        d_model: width of x and y.
        d_hidden: width of each expert's hidden layer.
        experts: number of experts.
        top_k: experts chosen for each token, 1 to `experts`.
        renormalize: whether the chosen experts' weights are scaled to sum to 1.
        capacity_factor: slots of an expert over its even share; used by `capacity` alone.

    Raises:
        ValueError: a size is not a positive integer, `top_k` is more than `experts`, or the factor is not
            positive and finite.
    """

    d_model: int
    d_hidden: int
    experts: int
    top_k: int
    renormalize: bool = True
    capacity_factor: float = 1.25

    def __post_init__(self) -> None:
        for name in ("d_model", "d_hidden", "experts", "top_k"):
            # A plain int: arithmetic on NumPy's narrow integers would overflow.
            object.__setattr__(self, name, positive(name, getattr(self, name)))
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k={self.top_k} is more than experts={self.experts}; choose 1..{self.experts}"
            )
        factor = self.capacity_factor
        if (
            isinstance(factor, bool)
            or not isinstance(factor, numbers.Real)
            or not math.isfinite(factor)
            or factor <= 0
        ):
            raise ValueError(f"capacity_factor={factor!r} must be a positive finite number, such as 1.25")
        if self.top_k == 1 and self.renormalize and self.experts > 1:
            warnings.warn(
                "top_k=1 with renormalize=True gives every token the constant weight 1, so the router gets "
                "no gradient; use renormalize=False to train it",
                stacklevel=3,
            )


def positive(name: str, value: object) -> int:
    """The value, if it is a positive integer; ValueError naming it otherwise."""
    return _integer(name, value, 1, "a positive integer")


def natural(name: str, value: object) -> int:
    """The value, if it is 0 or a positive integer; ValueError naming it otherwise."""
    return _integer(name, value, 0, "0 or a positive integer")


def _integer(name: str, value: object, least: int, wanted: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name}={value!r} must be {wanted}")
    return int(value)
