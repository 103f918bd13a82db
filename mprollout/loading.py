"""What runs inside SGLang's scheduler processes when new weights come: its `custom_weight_loader`.

    worker --payload a rank--> scheduler: load --> route's buckets (`route.arrivals`), else the staged copy --> model.load_weights

Invariant: `load` returns only when the model was given the whole set. A route that breaks midway (another process died, a checksum is wrong) is
left, and the staged copy loaded over what came of it. Every rank loads its own slices of whole tensors, so no two ranks need agree on that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

import msgspec

from mprollout.route import Route, arrivals, leave
from mprollout.weights import StagedWeights

LOADER = f"{__name__}.load"


class Order(msgspec.Struct, frozen=True):
    """What one rank is to load; it travels as the name of an empty tensor."""

    path: str
    """Of the staged copy's descriptor."""
    route: Route | None
    rank: int


def orders(weights: StagedWeights, route: Route | None, ranks: int) -> list[str]:
    """The payload of each tensor-parallel rank of this worker's engine."""
    path = f"/proc/{os.getpid()}/fd/{weights.fd}"
    first = route.rank if route is not None else 0
    return [msgspec.json.encode(Order(path, route, first + i)).decode() for i in range(ranks)]


def load(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """Load what each order says. The staged copy is not copied on its way: every rank maps the same memory."""
    for text, _ in named_tensors:
        order = msgspec.json.decode(text, type=Order)
        with StagedWeights.open(os.open(order.path, os.O_RDONLY | os.O_CLOEXEC), verify=False) as weights:
            if order.route is None or not _load_arrivals(model, order.route, order.rank, weights):
                model.load_weights(weights.tensors())


def _load_arrivals(model: Any, route: Route, rank: int, weights: StagedWeights) -> bool:
    try:
        for tensors in arrivals(route, rank, weights, next(model.parameters()).device):
            model.load_weights(tensors)
    except Exception:
        logging.getLogger(__name__).warning(
            "the way over %s broke: the staged copy is loaded", route.group, exc_info=True
        )
        leave(route.group)
        return False
    return True
