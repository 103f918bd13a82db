"""`RewardPool`: runs one worker's reward function where it can be killed.

    loop: score(samples) --pickle--> one of `workers` processes --> function(sample) --> checked numbers --msgpack--> loop
          async functions and "exact" run on the loop itself

    a call  produces one reward a sample / waits for a place, then for its process / unblocked by a call's end, the process's answer or death

Invariant: a call ends with as many finite floats as it has samples, or with a typed error, at most `timeout_s` after its
function started; `checked_numbers` guarantees the first, `RewardPool._ask` the second. A process serves one call at a time over
a socket of its own and shares no lock or queue with another, so killing one can neither block nor lose its neighbours' calls.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from mprollout import messages
from mprollout.config import FilterConfig, RewardConfig
from mprollout.errors import EngineClosed
from mprollout.functions import is_async, main_of
from mprollout.reward import (
    FilterFailed,
    Outcome,
    RewardInput,
    RewardRaised,
    RewardTimeout,
    checked_numbers,
    failure_of,
    resolve,
    where,
)

CANCEL_GRACE_S = 1.0
"""How long a cancelled call may still take to end by itself before its process is killed."""

START_TIMEOUT_S = 120.0
"""Longest start of a reward process, the import of the function's module included; not counted against `timeout_s`."""


_Request = tuple[str, list[RewardInput], list[float]]
_RAISED = {"reward": RewardRaised, "filter": FilterFailed}


# --- one process --------------------------------------------------------------------------------------------------------


class _Process:
    """The pool's end of one reward process. Used by one call at a time; `kill` may come at any moment."""

    def __init__(self, record: int) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._ready = False
        with theirs:
            fds = (theirs.fileno(), record)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mprollout.reward_process", *map(str, fds), str(os.getpid())],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
            )

    async def ready(self) -> None:
        """Returns when the process has made its function, or could not; raises EOFError when it died."""
        if not self._ready:
            await self._receive()
            self._ready = True

    async def call(self, request: _Request) -> Outcome:
        """Raises EOFError, or OSError, when the process died."""
        await asyncio.get_running_loop().sock_sendall(self._socket, pickle.dumps(request))
        return msgspec.msgpack.decode(await self._receive(), type=Outcome)

    async def _receive(self) -> bytes:
        return await self._exactly(int.from_bytes(await self._exactly(4), "little"))

    async def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            chunk = await asyncio.get_running_loop().sock_recv(self._socket, count - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def kill(self) -> None:
        """SIGKILL: C code that holds the GIL, or a function that catches everything, obeys nothing less. Does not wait."""
        self.process.kill()

    def discard(self) -> None:
        """Kill, and close the socket; not while a call is under way."""
        self.kill()
        self._socket.close()


# --- the pool -----------------------------------------------------------------------------------------------------------


class RewardPool:
    """Runs the reward function, and the filter function, for one worker's event loop.

    Sync functions run in `workers` spawned processes, one call each at a time; async ones run on the loop,
    `max_concurrency` at once; "exact" is too cheap to send away and runs on the loop too. A call that waits for its place
    is not yet timed. A process whose call exceeds `timeout_s`, or is cancelled and does not end within a second, is killed and replaced.

    Made in the process's main thread after the worker has its `__main__` in place: a function of the user's script
    is found through it, here and (by multiprocessing's own preparation) in the reward processes.

    Example:
        >>> pool = RewardPool(RewardConfig("math", timeout_s=10))  # doctest: +SKIP
        >>> pool.warm()  # doctest: +SKIP
        >>> reward = await pool.score_one(sample)  # doctest: +SKIP
        >>> pool.close()  # doctest: +SKIP

    Raises:
        ConfigError: as `resolve`.
    """

    def __init__(self, config: RewardConfig, group_filter: FilterConfig | None = None) -> None:
        self._config, self._filter = config, group_filter or FilterConfig()
        function = resolve(config)
        self._async: Callable[..., Awaitable[Any]] | None = function if is_async(function) else None
        self._inline = function if config.function == "exact" else None
        self._async_places, self._places = asyncio.Semaphore(config.max_concurrency), asyncio.Semaphore(config.workers)
        main = main_of(config.function, self._filter.function)
        self._record = messages.blob(pickle.dumps((*main, sys.path, pickle.dumps((config, self._filter)))))
        self._idle: list[_Process] = []  # started, and without a call
        self._processes: set[_Process] = set()  # idle or serving
        self._killed: list[subprocess.Popen[bytes]] = []  # not yet reaped
        self._calls: set[asyncio.Task[Outcome]] = set()
        self._closed = False

    def warm(self) -> None:
        """Start the processes (some milliseconds each; their imports are not waited for). Without it the first call does."""
        needed = (self._async is None and self._inline is None) or self._filter.function is not None
        if needed and not self._processes and not self._closed:
            self._idle = [self._start() for _ in range(self._config.workers)]
            atexit.register(self.close)

    async def score_one(self, sample: RewardInput) -> float:
        """The reward of one sample (`per="sample"`). A cancelled call that does not end within a second is killed.

        Raises:
            RewardTimeout: the function ran longer than `timeout_s`.
            RewardRaised: the function raised, could not be imported, or its process died.
            RewardError: what it returned is no finite number.
            EngineClosed: the pool was closed before or meanwhile.
        """
        return (await self._score([sample]))[0]

    async def score(self, samples: list[RewardInput]) -> list[float]:
        """The rewards of a group (`per="group"`), in its order. A cancelled call that does not end within a second is killed. Raises as `score_one`."""
        return await self._score(samples)

    async def reject(self, samples: list[RewardInput], rewards: list[float]) -> str:
        """The filter function's reason to reject a scored group; "" keeps it.

        Raises:
            RewardTimeout: the function ran longer than `FilterConfig.timeout_s`.
            FilterFailed: it raised, could not be imported, or returned what is no reason; or its process died.
            EngineClosed: the pool was closed before or meanwhile.
        """
        return (await self._call("filter", samples, rewards)).rejected

    def close(self) -> None:
        """Kill all processes at once, whatever they run, and reap them. Calls under way raise `EngineClosed`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill()
        for process in self._idle:
            process.discard()
        for killed in (*self._killed, *(process.process for process in self._processes)):
            killed.wait()  # SIGKILL was sent: no running function is waited for
        os.close(self._record)

    async def _score(self, samples: list[RewardInput]) -> list[float]:
        if self._closed:
            raise EngineClosed("the reward pool is closed")
        if self._async is not None:
            return await self._call_async(self._async, samples)
        if self._inline is not None:
            return checked_numbers(self._inline(samples[0]), samples, "sample")
        return (await self._call("reward", samples, [])).rewards

    async def _call_async(self, function: Callable[..., Awaitable[Any]], samples: list[RewardInput]) -> list[float]:
        per = self._config.per
        async with self._async_places:
            try:
                async with asyncio.timeout(self._config.timeout_s) as deadline:
                    value = await function(samples if per == "group" else samples[0])
            except BaseException as error:  # SystemExit too, which would end the loop, and a CancelledError of its own
                task = asyncio.current_task()
                if isinstance(error, GeneratorExit) or (task is not None and task.cancelling()):
                    raise
                if deadline.expired():
                    limit = f"exceeded timeout_s={self._config.timeout_s}"
                    raise RewardTimeout(f"{where(samples)}: the reward function {limit}") from error
                return failure_of(error).check(where(samples)).rewards  # raises
        return checked_numbers(value, samples, per)

    async def _call(self, what: str, samples: list[RewardInput], rewards: list[float]) -> Outcome:
        self.warm()
        await self._places.acquire()  # the wait is not timed, and a call cancelled in it costs no process
        if self._closed:
            self._places.release()
            raise EngineClosed("the reward pool is closed")
        process = self._idle.pop() if self._idle else self._start()
        call = asyncio.ensure_future(self._one_call(process, (what, samples, rewards)))
        self._calls.add(call)
        call.add_done_callback(self._on_call_done)
        try:
            outcome = await asyncio.shield(call)
        except asyncio.CancelledError:
            # Most calls end in a moment, and a kill costs the start of a process: a group's siblings are cancelled by the dozen.
            asyncio.get_running_loop().call_later(CANCEL_GRACE_S, call.cancel)
            raise
        return outcome.check(where(samples), _RAISED[what])

    async def _one_call(self, process: _Process, request: _Request) -> Outcome:
        outcome = None
        try:
            outcome = await self._ask(process, request)
            return outcome
        finally:
            self._give_back(process, reusable=outcome is not None)
            self._places.release()

    def _on_call_done(self, call: asyncio.Task[Outcome]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # its waiter may be gone

    async def _ask(self, process: _Process, request: _Request) -> Outcome:
        what, samples, _ = request
        limit_s = self._config.timeout_s if what == "reward" else self._filter.timeout_s
        limit = f"did not start within {START_TIMEOUT_S} s"
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await process.ready()
            limit = f"exceeded timeout_s={limit_s}"
            async with asyncio.timeout(limit_s):
                return await process.call(request)
        except TimeoutError as error:
            raise RewardTimeout(f"{where(samples)}: the {what} function {limit}") from error
        except (EOFError, OSError) as error:
            if self._closed:
                raise EngineClosed("the reward pool was closed while it scored") from error
            process.kill()  # it may have closed its socket and live on
            died = f"the {what}'s process {process.process.pid} died with exit code {process.process.wait()}"
            raise _RAISED[what](f"{where(samples)}: {died}") from error

    def _give_back(self, process: _Process, reusable: bool) -> None:
        if reusable and not self._closed:
            self._idle.append(process)
            return
        process.discard()
        if not self._closed:
            self._processes.remove(process)
            self._killed.append(process.process)
            self._killed = [one for one in self._killed if one.poll() is None]  # reaps
            with contextlib.suppress(OSError):  # no process to be had now: the next call tries again, and says so
                self._idle.append(self._start())

    def _start(self) -> _Process:
        process = _Process(self._record)
        self._processes.add(process)
        return process
