"""`Adapters`: a policy that is a LoRA adapter over weights that stay, each version an adapter of its own in SGLang.

    update --load--> "version 7" --> requests that start from now on;  "version 6" goes when its last request has ended

Invariant: a request is sampled by one version from its first token to its last (SGLang binds a request to its adapter), so a load stops
nobody and its tokens carry the version it began with. SGLang's prefix cache is keyed by the adapter, so no prefix of another version is used.
Before the first update the policy is version 0: the base model, as a fresh adapter is whose B is zero.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mprollout.weights import StagedWeights

_PREFIX = "base_model.model."
"""Of every name in a PEFT adapter."""


class Adapters:
    """The adapters of one SGLang engine.

    Args:
        config: PEFT's `adapter_config`: `r`, `lora_alpha`, `target_modules`, ...
        manager, io: SGLang's tokenizer manager, and the module of its request classes.
        ranks: tensor-parallel processes of the engine.
    """

    def __init__(self, config: dict[str, Any], manager: Any, io: Any, ranks: int) -> None:
        self._config, self._manager, self._io, self._ranks = config, manager, io, ranks
        self._loaded: set[int] = set()
        self._newest = 0
        self._requests: collections.Counter[int] = collections.Counter()
        self._unloading: set[asyncio.Task[Any]] = set()

    @contextlib.contextmanager
    def serving(self) -> Iterator[tuple[int, str | None]]:
        """(version, SGLang's name of the adapter) for one request; None: the base model. The adapter stays for as long as this is open."""
        version = self._newest
        self._requests[version] += 1
        try:
            yield version, _name(version) if version else None
        finally:
            self._requests[version] -= 1
            self._unload_unused()

    async def load(self, weights: StagedWeights, version: int) -> None:
        """Have requests that start from now on sampled by this adapter.

        Raises:
            ValueError: SGLang refused it; the one before stays.
        """
        from sglang.srt.utils import MultiprocessingSerializer

        tensors = {name: tensor.clone() for name, tensor in weights.tensors()}
        request = self._io.LoadLoRAAdapterFromTensorsReqInput(
            lora_name=_name(version),
            config_dict={"peft_type": "LORA", "bias": "none", **self._config},
            serialized_named_tensors=[MultiprocessingSerializer.serialize(tensors) for _ in range(self._ranks)],
        )
        result = await self._manager.load_lora_adapter_from_tensors(request, None)
        if not result.success:
            raise ValueError(f"SGLang refused the adapter: {result.error_message}")
        self._loaded.add(version)
        self._newest = version
        self._unload_unused()

    def close(self) -> None:
        for task in self._unloading:
            task.cancel()

    def _unload_unused(self) -> None:
        # Only where no request is left: SGLang would wait for it with the lock that a load needs.
        for version in [v for v in self._loaded if v != self._newest and not self._requests[v]]:
            self._loaded.discard(version)
            request = self._io.UnloadLoRAAdapterReqInput(lora_name=_name(version))
            task = asyncio.ensure_future(self._manager.unload_lora_adapter(request, None))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)


def engine_args(config: dict[str, Any], device: str) -> dict[str, Any]:
    """What SGLang's engine needs for such adapters."""
    args = {"enable_lora": True, "max_lora_rank": config["r"], "lora_target_modules": list(config["target_modules"])}
    return args | ({"lora_backend": "torch_native"} if device == "cpu" else {})


def adapter_shapes(config: dict[str, Any], base: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shape by name, as PEFT names them, of all that an adapter over a checkpoint of these shapes has."""
    rank, targets = config["r"], set(config["target_modules"])
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in base.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and len(shape) == 2 and module.rpartition(".")[2] in targets:
            shapes[f"{_PREFIX}{module}.lora_A.weight"] = (rank, shape[1])
            shapes[f"{_PREFIX}{module}.lora_B.weight"] = (shape[0], rank)
    return shapes


def _name(version: int) -> str:
    return f"version {version}"
