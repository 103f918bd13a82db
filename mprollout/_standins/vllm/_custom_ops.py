"""See `vllm/__init__.py` beside this file."""

from typing import Any


def rotary_embedding(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("vllm is a stand-in here: SGLang should have used its native rotary embedding")
