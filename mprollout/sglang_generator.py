"""`SGLangGenerator`: SGLang behind the `Generator` interface. Made and used in a worker's main thread and event loop.

    generate --gate--> TokenizerManager (here) --zmq--> scheduler --> detokenizer --> TokenizerManager --> Generation
    update_weights: gate closed -> pause -> begin -> update (the scheduler maps the staged memory file) -> end -> continue -> gate open

Invariant: a token's version is the one its weights had. SGLang's own spans per request guarantee it; a request starts only while the
gate is open, so its prefix-cache key names the version it starts under. A broken engine (a process of it died, an update failed midway)
samples nothing any more: `check` raises and requests wait for the worker's end, which spares their prompts a failed attempt.

Nothing is left behind: SGLang's processes die with this one (`orphans.patch_spawn`), its files in /dev/shm are not made
(`sglang_setup.run_scheduler`), its sockets lie in TMPDIR and go with that folder or with `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mprollout import _native
from mprollout.adapters import Adapters, adapter_shapes, engine_args
from mprollout.generator import GenerateRequest, Generation, Generator, PauseMode, UpdatePhase, VersionSpan
from mprollout.loading import LOADER, orders
from mprollout.orphans import patch_spawn
from mprollout.sglang_setup import (
    bind_ranks,
    check_folder,
    checkpoint_folder,
    ignore,
    import_sglang,
    install_standins,
    our_logging_and_policy,
)
from mprollout.tokenizer import HuggingFaceTokenizer, load_tokenizer
from mprollout.weight_files import checkpoint_shapes
from mprollout.weights import check_parameters

if TYPE_CHECKING:
    from mprollout.config import SGLangConfig
    from mprollout.route import Route
    from mprollout.weights import StagedWeights

T = TypeVar("T")

_SLEEP_TIMEOUT_S = 60.0
"""Longest sleep, wake, or end of a process that was killed. The phases of an update have theirs in `WeightsConfig`."""


class SGLangGenerator(Generator):
    """An SGLang engine.

    Args:
        config: the model, the device and what to pass to `sglang.Engine`; `engine_args` win over everything chosen here.
        devices: this worker's devices; their number is the tensor-parallel size. Which GPUs they are is CUDA_VISIBLE_DEVICES's business.
        max_running_samples: most requests running at once.
        seed: of the engine; requests cannot be seeded one by one.
        colocated: it will sleep; on a GPU it then uses the package torch_memory_saver and keeps its weights in host memory meanwhile.

    Example:
        generator = SGLangGenerator(SGLangConfig(model=folder), devices=["cpu"], max_running_samples=32, seed=0)
        await generator.start()
        generation = await generator.generate(request)
        await generator.close()
    """

    def __init__(
        self,
        config: SGLangConfig,
        *,
        devices: Sequence[int | str],
        max_running_samples: int,
        seed: int,
        colocated: bool = False,
    ) -> None:
        self.version = 0
        self._config = config
        self._devices = list(devices)
        self._max_running_samples = max_running_samples
        self._seed, self._colocated = seed, colocated
        self._device = "cpu" if config.device == "cpu" or (config.device == "auto" and "cpu" in devices) else "cuda"
        self._expected: dict[str, tuple[int, ...]] = {}
        self._optional: set[str] = set()
        self._running: dict[str, _Running] = {}
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._asleep: set[str] = set()
        self._adapters: Adapters | None = None
        self._updating = asyncio.Lock()
        self._open = asyncio.Event()
        self._broken: str | None = None
        self._processes: dict[str, Any] = {}
        self._engine: Any = None

    async def start(self) -> None:
        """Load the model; blocks the event loop (15 s for a tiny model on a CPU, minutes for a large one).

        Raises:
            ValueError: `model` is no folder of a Hugging Face checkpoint.
            RuntimeError: SGLang could not start; the cause is its own.
        """
        check_folder(self._config.model)
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "SGLang's engine must be made in the main thread: its processes die with the thread that starts them"
            )
        patch_spawn()
        if self._device == "cpu":
            # Two engines on two cores are five times faster so than with torch's default.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            bind_ranks(self._config.engine_args.get("tp_size", 1))
            install_standins()
        os.environ.setdefault("TQDM_DISABLE", "1")
        with our_logging_and_policy():
            engine_type, self._io = import_sglang()
            self._previous_sigquit = signal.getsignal(signal.SIGQUIT)
            self._engine = engine_type(**self._engine_args())
        manager = self._manager = self._engine.tokenizer_manager
        manager._subprocess_watchdog.stop()
        watched = manager._subprocess_watchdog
        self._processes = dict(zip(watched._names, watched._processes, strict=True))
        self._dead = asyncio.get_running_loop().create_future()
        for process in self._processes.values():
            asyncio.get_running_loop().add_reader(process.sentinel, self._note_death)
        # What SGLang's auto_create_handle_loop does, without its signal handlers.
        manager.event_loop = asyncio.get_running_loop()
        self._receiver = asyncio.create_task(manager.handle_loop(), name="sglang-receiver")
        info = self._engine._scheduler_init_result.scheduler_infos[0]
        self.context_length = min(manager.context_len, info["max_total_num_tokens"])
        self.tokenizer = HuggingFaceTokenizer(
            manager.tokenizer or load_tokenizer(self._engine.server_args.tokenizer_path)
        )
        self._expect_parameters(checkpoint_folder(self._config.model))
        if (adapter := self._config.adapter) is not None:
            self._adapters = Adapters(adapter, manager, self._io, self._engine.server_args.tp_size)
            self._expected, self._optional = adapter_shapes(adapter, self._expected), set()
        self._open.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Generator.generate`. On a broken engine it does not return; `check` says why.

        Raises:
            ValueError: prompt and `max_new_tokens` exceed the context length, or SGLang refuses the request.
        """
        rid = request.request_id
        total = len(request.prompt_ids) + request.max_new_tokens
        if total > self.context_length:
            raise ValueError(
                f"request {rid}: {len(request.prompt_ids)} prompt tokens + {request.max_new_tokens} new tokens = {total} exceed "
                f"the context length {self.context_length}"
            )
        if rid in self._running or rid in self._waiting:
            raise ValueError(f"request id {rid!r} is already in use")
        while not self._open.is_set():
            if await self._aborted_at_the_gate(rid):
                return Generation(token_ids=[], logprobs=[], finish_reason="abort", versions=[])
        running = self._running[rid] = _Running(asyncio.current_task())  # type: ignore[arg-type]
        try:
            with (
                self._adapters.serving() if self._adapters else contextlib.nullcontext((None, None)) as (version, name)
            ):
                asked = self._engine_request(request, name)
                answers = [answer async for answer in self._manager.generate_request(asked, None)]
        finally:
            del self._running[rid]
            running.ended.set_result(None)
        return _generation(answers[-1], version, running.in_place)

    async def abort(self, request_id: str | None = None) -> None:
        self._let_go(aborted=True, request_id=request_id)
        for rid in list(self._running) if request_id is None else [request_id]:
            if rid in self._running:
                self._manager.abort_request(_engine_rid(rid))

    async def update_weights(
        self, weights: StagedWeights, version: int, pause: PauseMode, route: Route | None = None
    ) -> None:
        """See `Generator.update_weights`. `retract` and `abort` flush the prefix cache; `in_place` keeps it and the running KV entries.

        With `SGLangConfig.adapter` the tensors are an adapter's: requests that run go on with theirs (`abort`: end), so nothing is paused.

        Raises:
            ValueError: the names or shapes are not the engine's; nothing was touched.
            RuntimeError: the engine failed midway and is broken.
        """
        async with self._updating:
            self._refuse_if_broken()
            if not self._expected:  # a checkpoint without safetensors: the first update is the reference
                self._expected = dict(weights.shapes)
            check_parameters(weights.shapes, self._expected, self._optional)
            await self._resume(["weights"])
            self._open.clear()
            touched = False
            try:
                async with self.phase("pause"):
                    if pause == "abort":
                        await self._end_running()
                    if self._adapters is None:
                        await self._pause("in_place" if pause == "in_place" else "retract")
                if self._adapters is not None:
                    async with self.phase("update"):
                        await self._within("load", self._adapters.load(weights, version))
                else:
                    touched = True
                    await self._load(weights, version, route, flush=pause != "in_place")
                self.version, touched = version, False
                if pause == "in_place":
                    for running in self._running.values():
                        running.in_place.add(version)
            finally:
                if touched:
                    self._broken = (
                        self._broken or f"update to version {version} failed midway: the engine's weights are undefined"
                    )
                async with self.phase("continue"):
                    await self._go_on()

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Release GPU memory; needs `colocated` there. On a CPU it pauses and releases nothing.

        Raises:
            RuntimeError: on a GPU without the memory saver.
        """
        if self._device == "cuda" and not self._engine.server_args.enable_memory_saver:
            raise RuntimeError(
                'sleep needs WorkerConfig.placement="colocated", or SGLang\'s enable_memory_saver (package torch_memory_saver)'
            )
        async with self._updating:
            new = [tag for tag in tags if tag not in self._asleep]
            if new:
                self._open.clear()
                await self._pause("retract")
                request = self._io.ReleaseMemoryOccupationReqInput(tags=new)
                await self._within("sleep", self._manager.release_memory_occupation(request, None), _SLEEP_TIMEOUT_S)
                self._asleep.update(new)

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        async with self._updating:
            await self._resume(tags)
            await self._go_on(_SLEEP_TIMEOUT_S)

    async def _resume(self, tags: Sequence[str]) -> None:
        known = [tag for tag in tags if tag in self._asleep]
        if known:
            request = self._io.ResumeMemoryOccupationReqInput(tags=known)
            await self._within("wake", self._manager.resume_memory_occupation(request, None), _SLEEP_TIMEOUT_S)
            self._asleep.difference_update(known)

    def check(self) -> None:
        """Raise when the engine is broken.

        Raises:
            RuntimeError: names the process that ended, its pid and exit code; or the update that failed midway.
        """
        self._note_death()
        self._refuse_if_broken()
        if self._engine is not None and self._receiver.done():
            raise RuntimeError("SGLang's receiving task ended") from self._receiver.exception()

    async def close(self) -> None:
        """End the engine, its processes and its sockets. Running requests are cancelled. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        import atexit

        import psutil

        atexit.unregister(engine.shutdown)  # it would kill every child of this process, the reward pool's too
        self._receiver.cancel()
        if self._adapters is not None:
            self._adapters.close()
        for running in self._running.values():
            running.task.cancel()
        self._let_go(aborted=True)
        processes, self._processes = list(self._processes.values()), {}
        for process in processes:
            asyncio.get_running_loop().remove_reader(process.sentinel)
            with contextlib.suppress(psutil.NoSuchProcess):
                for descendant in psutil.Process(process.pid).children(recursive=True):
                    descendant.kill()
            process.kill()
        for process in processes:
            await asyncio.to_thread(process.join, _SLEEP_TIMEOUT_S)
            process.close()
        for socket in (engine.send_to_rpc, self._manager.recv_from_detokenizer, self._manager.send_to_scheduler):
            socket.close(linger=0)
        _unlink_sockets(engine.port_args)
        signal.signal(signal.SIGQUIT, self._previous_sigquit)

    # -- starting ------------------------------------------------------------------------------------------------------

    def _engine_args(self) -> dict[str, Any]:
        given = self._config.engine_args
        args: dict[str, Any] = {
            "model_path": self._config.model,
            "device": self._device,
            "dtype": self._config.dtype,
            "random_seed": self._seed,
            "max_running_requests": self._max_running_samples,
            "weight_version": "0",
            "skip_server_warmup": True,
            "sleep_on_idle": True,  # else the scheduler spins on one core while there is nothing to do
            # SGLang's processes report a failure by SIGQUIT, and its own handler then kills this process without a word.
            "custom_sigquit_handler": ignore,
            "log_level": "error",
        }
        if self._device == "cpu":
            args |= {
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "grammar_backend": "none",
                "disable_overlap_schedule": True,
                "max_total_tokens": max(16384, 512 * self._max_running_samples),
                "mem_fraction_static": 0.3,
            }
            if self._config.dtype == "auto":
                args["dtype"] = "float32"
        else:
            args["tp_size"] = len(self._devices)
            if self._colocated:
                args |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        if self._config.adapter is not None:
            args |= engine_args(self._config.adapter, self._device)
        return args | given | {"custom_weight_loader": [*given.get("custom_weight_loader", ()), LOADER]}

    def _expect_parameters(self, folder: Path | None) -> None:
        if folder is None:
            return
        self._expected = checkpoint_shapes(folder)
        tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
        embedding = next(
            (shape for name, shape in self._expected.items() if name.endswith("embed_tokens.weight")), None
        )
        if tied and embedding:
            self._expected["lm_head.weight"] = embedding
            self._optional = {"lm_head.weight"}

    # -- generating ----------------------------------------------------------------------------------------------------

    def _engine_request(self, request: GenerateRequest, adapter: str | None) -> Any:
        sampling = request.sampling
        return self._io.GenerateReqInput(
            input_ids=request.prompt_ids,
            rid=_engine_rid(request.request_id),
            return_logprob=True,
            logprob_start_len=-1,
            return_sampling_mask=sampling.bounded_support,  # its logprobs are those within what top-k, top-p and min-p keep
            lora_path=adapter,
            extra_key=f"version {self.version}",
            sampling_params={
                "max_new_tokens": request.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "stop": sampling.stop or None,
                "stop_token_ids": sampling.stop_token_ids or None,
                "ignore_eos": sampling.ignore_eos,
                # Said aloud, because a model's generation config may say otherwise.
                "repetition_penalty": sampling.repetition_penalty,
                "presence_penalty": sampling.presence_penalty,
                "frequency_penalty": sampling.frequency_penalty,
            },
        )

    async def _aborted_at_the_gate(self, rid: str) -> bool:
        """Wait until the gate may be open again (False) or the request is aborted (True)."""
        self._waiting[rid] = asyncio.get_running_loop().create_future()
        try:
            return await self._waiting[rid]
        finally:
            del self._waiting[rid]

    def _let_go(self, aborted: bool, request_id: str | None = None) -> None:
        for rid, future in self._waiting.items():
            if request_id in (None, rid) and not future.done():
                future.set_result(aborted)

    # -- pausing and updating ------------------------------------------------------------------------------------------

    async def _end_running(self) -> None:
        await self.abort()
        if self._running:
            await asyncio.wait([running.ended for running in self._running.values()])

    async def _pause(self, mode: str) -> None:
        await self._within("pause", self._manager.pause_generation(self._io.PauseGenerationReqInput(mode=mode)))

    async def _load(self, weights: StagedWeights, version: int, route: Route | None, flush: bool) -> None:
        import torch
        from sglang.srt.utils import MultiprocessingSerializer

        manager, io = self._manager, self._io
        request = io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[
                MultiprocessingSerializer.serialize([(order, torch.empty(0))])
                for order in orders(weights, route, self._engine.server_args.tp_size)
            ],
            load_format=LOADER,
            flush_cache=flush,
            weight_version=str(version),
        )
        begin, end = io.BeginWeightUpdateReqInput(), io.EndWeightUpdateReqInput()
        await self._step("begin", manager.begin_weight_update(begin, None))
        await self._step("update", manager.update_weights_from_tensor(request, None))
        await self._step("end", manager.end_weight_update(end, None))

    async def _step(self, phase: UpdatePhase, call: Coroutine[Any, Any, tuple[bool, str]]) -> None:
        async with self.phase(phase):
            success, message = await self._within(phase, call)
        if not success:
            raise RuntimeError(f"phase `{phase}`: SGLang says: {message}")

    async def _go_on(self, limit_s: float | None = None) -> None:
        if self._asleep or self._broken:
            return
        request = self._io.ContinueGenerationReqInput(torch_empty_cache=self._device == "cuda")
        await self._within("continue", self._manager.continue_generation(request), limit_s)
        self._open.set()
        self._let_go(aborted=False)

    # -- failing -------------------------------------------------------------------------------------------------------

    def _note_death(self) -> None:
        for name, process in self._processes.items():
            if not process.is_alive() and not self._dead.done():
                asyncio.get_running_loop().remove_reader(process.sentinel)
                self._broken = f"SGLang's {name} (pid {process.pid}) ended with exit code {process.exitcode}"
                self._open.clear()
                self._dead.set_result(None)

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise RuntimeError(self._broken)

    async def _within(self, what: str, call: Coroutine[Any, Any, T], limit_s: float | None = None) -> T:
        """The call's result; RuntimeError when it takes too long or a process of the engine dies meanwhile."""
        task = asyncio.create_task(call)
        try:
            await asyncio.wait([task, self._dead], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self._refuse_if_broken()
            raise RuntimeError(f"SGLang's {what} took more than {limit_s} s")
        finally:
            task.cancel()


class _Running:
    """A request under way."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Its end is not the task's: what an update aborted asks again, and waits at the gate."""
        self.in_place: set[int] = set()
        """Versions that came in place while it ran: what it sampled under them rests on older key-value entries."""


def _unlink_sockets(port_args: Any) -> None:
    for address in vars(port_args).values():
        if isinstance(address, str) and address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def _engine_rid(request_id: str) -> str:
    """SGLang aborts every request whose id *starts with* the one given, so no id may be the start of another."""
    return request_id + "\n"


def _generation(answer: dict[str, Any], version: int | None, in_place: set[int]) -> Generation:
    """`version`: of all tokens; None: SGLang's spans say it. `in_place`: versions whose tokens rest on older key-value entries."""
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    token_ids = list(answer["output_ids"])
    logprobs = meta.get("output_token_sampling_logprobs")
    if logprobs is None:
        logprobs = _native.first_of_each(meta.get("output_token_logprobs", ()))  # of [logprob, id, text]
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason["type"],
        versions=[
            VersionSpan(
                int(span["version"]) if version is None else version,
                span["start"],
                span["end"],
                int(span["version"]) in in_place,
            )
            for span in meta.get("weight_versions", ())
            if span["end"] > span["start"]
        ],
        matched_stop=reason.get("matched"),
    )
