"""Registers the ring's memory with CUDA, so that copies from its views to a GPU are asynchronous and need no staging.

Invariant: what was registered is unregistered before the memory is unmapped: `RolloutEngine` does it when it closes, and a
mapping lives at least as long as its engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from mprollout import _native

log = logging.getLogger("mprollout")


def register(segment: _native.Segment) -> Callable[[], None] | None:
    """Page-lock the mapping in this process (`cudaHostRegister`); blocks for a part of a second a gigabyte.

    Returns:
        What undoes it; None, with a line in the log, where that is not possible: copies then go through CUDA's own staging.
    """
    try:
        import torch
    except ImportError:
        log.warning("the ring is not pinned: torch is not installed")
        return None
    if not torch.cuda.is_available():
        log.warning("the ring is not pinned: torch sees no CUDA device")
        return None
    cudart, address = torch.cuda.cudart(), segment.address
    if error := int(cudart.cudaHostRegister(address, segment.size_bytes, 0)):
        log.warning("the ring is not pinned: cudaHostRegister of %d bytes returned error %d", segment.size_bytes, error)
        return None

    def unregister() -> None:
        cudart.cudaHostUnregister(address)

    return unregister
