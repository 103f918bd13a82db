"""Rewards: the scorers, and the pool that runs and kills them.

    loop: score(samples) --pickle--> one of `workers` processes --> function(sample) --> checked numbers --msgpack--> loop
          async functions and "exact" run on the loop itself

A reward function has one signature, `def reward(sample: RewardInput) -> float`; with `RewardConfig.per == "group"` it is
`def reward(samples: list[RewardInput]) -> list[float]`. Either may be `async def`. `RewardConfig.kwargs` are passed on.

Invariant: a call ends with as many finite floats as it has samples, or with a typed error, at most `timeout_s` after its
function started; `_numbers` guarantees the first, `RewardPool._ask` the second. A process serves one call at a time over
a socket of its own and shares no lock or queue with another, so killing one can neither block nor lose its neighbours' calls.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import multiprocessing
import numbers
import os
import pickle
import re
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.context import SpawnProcess
from typing import Any

import msgspec

import mprollout
from mprollout.config import RewardConfig
from mprollout.errors import ConfigError, EngineClosed, MprolloutError, RewardError
from mprollout.generator import FinishReason
from mprollout.source import Prompt, gym_dataset

CANCEL_GRACE_S = 1.0
"""How long a cancelled call may still take to end by itself before its process is killed."""

START_TIMEOUT_S = 120.0
"""Longest start of a reward process, the import of the function's module included; not counted against `timeout_s`."""


class RewardInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward function sees of one sample."""

    prompt: Prompt
    text: str
    """The completion without special tokens."""
    token_ids: list[int]
    finish_reason: FinishReason
    index: int
    """Of the sample in its group, from 0."""

    @property
    def answer(self) -> Any:
        """The row's answer; None if it has none."""
        return self.prompt.answer


class RewardTimeout(MprolloutError, TimeoutError):
    """A reward function exceeded `RewardConfig.timeout_s` and was killed (async: cancelled); names ticket and sample."""


class RewardRaised(MprolloutError, RuntimeError):
    """A reward function raised, or its process died; `traceback_text` is its own traceback ("" if it died)."""

    def __init__(self, message: str, traceback_text: str = "") -> None:
        super().__init__(
            message + (f"\n--- traceback of the reward function ---\n{traceback_text}" if traceback_text else "")
        )
        self.traceback_text = traceback_text


# --- the scorers -------------------------------------------------------------------------------------------------------


def _answer(sample: RewardInput) -> str:
    if sample.answer is None:
        raise RewardError(f"{_where([sample])}: the row has no answer to compare with (SourceConfig.answer_field)")
    return str(sample.answer)


def _exact(sample: RewardInput) -> float:
    """1.0 if the stripped text is the stripped answer."""
    return float(sample.text.strip() == _answer(sample).strip())


def _regex(sample: RewardInput, *, pattern: str) -> float:
    """1.0 if the pattern's last match (its first group, if it has one) is the answer; without an answer, if it matches."""
    found = list(re.finditer(pattern, sample.text, re.DOTALL))
    if not found or sample.answer is None:
        return float(bool(found))
    got = found[-1].group(1 if found[-1].re.groups else 0)
    return float(got is not None and got.strip() == _answer(sample).strip())


def _math(sample: RewardInput) -> float:
    r"""1.0 if math-verify finds the answer's value in the text: in the last \boxed{}, in all boxes as a set, or else in
    the last LaTeX or plain number.

    What sympy cannot settle within math-verify's own 5 s alarms counts as not verified (0.0); the alarms work because a
    reward process runs its function in its main thread. What ignores them is killed at `timeout_s`.
    """
    from math_verify import parse, verify

    answer = _answer(sample).rsplit("####", 1)[-1].strip()  # GSM8K's answers end so
    gold = parse(answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer}}}")
    last = sample.text[max(sample.text.rfind("\\boxed"), 0) :]  # of several boxes math-verify makes a set
    return float(any(verify(gold, parse(text)) for text in dict.fromkeys([last, sample.text])))


def _row(sample: RewardInput) -> float:
    """reasoning-gym's own score, in [0, 1], of what stands between the last <answer> tags, or else of the whole text."""
    if sample.prompt.scorer is None:
        raise RewardError(
            f'{_where([sample])}: the reward "row" needs rows that bring a scorer: set SourceConfig.reasoning_gym'
        )
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(sample.text)
    entry = _gym_entry(sample.prompt.scorer, sample.prompt.row)
    return float(
        gym_dataset(sample.prompt.scorer).score_answer(sample.text.strip() if answer is None else answer, entry)
    )


@functools.lru_cache(maxsize=64)
def _gym_entry(scorer: str, row: int) -> Any:
    # made again rather than read from `prompt.fields`: msgpack makes lists of tuples, and some scorers compare tuples
    return gym_dataset(scorer)[row]


_BUILTIN: dict[str, Callable[..., float]] = {"exact": _exact, "math": _math, "regex": _regex, "row": _row}
_NEEDS = {"math": ("math_verify", "math-verify"), "row": ("reasoning_gym", "reasoning-gym")}


# --- from a setting to a function --------------------------------------------------------------------------------------


def check(config: RewardConfig) -> None:
    """Refuse in the trainer, before anything starts, what cannot work. Imports neither the user's module nor a verifier.

    Raises:
        ConfigError: unknown name (the known ones are listed), missing package or module, arguments that do not fit, or a
            function that another process cannot import.
    """
    function = config.function
    if isinstance(function, str) and ":" not in function:
        _check_builtin(config)
    elif isinstance(function, str):
        module, _, attribute = function.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            raise ConfigError(f'RewardConfig.function must be "module:function"; got {function!r}')
        if importlib.util.find_spec(module.split(".")[0]) is None:
            raise ConfigError(
                f"RewardConfig.function: no module {module.split('.')[0]!r} on sys.path; got {function!r}"
            )
    elif not callable(function):
        raise ConfigError(f"RewardConfig.function must be a name or a function; got {function!r}")
    else:
        main = sys.modules["__main__"]
        importable = getattr(main, "__spec__", None) or os.path.isfile(
            getattr(main, "__file__", "")
        )  # "<stdin>" is none
        if getattr(function, "__module__", None) == "__main__" and not importable:
            raise ConfigError(
                f"RewardConfig.function: {function!r} is defined in an interactive session, which the worker processes "
                'cannot import: put it into a file and name it "module:function"'
            )
        _check_arguments(function, config)
    try:
        pickle.dumps(config)
    except Exception as error:  # pickle raises PicklingError, AttributeError, TypeError, and what a __reduce__ raises
        raise ConfigError(
            f"RewardConfig cannot be handed to another process ({error}): the function must be a `def` at the top level of "
            "a module (no lambda, no function inside a function); hand it what it closes over as RewardConfig.kwargs"
        ) from error


def _check_builtin(config: RewardConfig) -> None:
    name = config.function
    if name not in _BUILTIN:
        near = difflib.get_close_matches(name, _BUILTIN, n=1)
        raise ConfigError(
            f'RewardConfig.function must be one of {", ".join(map(repr, _BUILTIN))}, "module:function", or a function; '
            f"got {name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
        )
    if config.per != "sample":
        raise ConfigError(f'RewardConfig.per must be "sample" with {name!r}; got {config.per!r}')
    module, package = _NEEDS.get(name, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"RewardConfig.function={name!r} needs a package that is not installed: pip install {package}"
        )
    _check_arguments(_BUILTIN[name], config)
    if name == "regex":
        try:
            re.compile(config.kwargs["pattern"])
        except (re.error, TypeError) as error:
            raise ConfigError(f"RewardConfig.kwargs['pattern']: {error}; got {config.kwargs['pattern']!r}") from error


def _check_arguments(function: Callable[..., Any], config: RewardConfig) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(None, **config.kwargs)
    except TypeError as error:
        what = "sample" if config.per == "sample" else "samples"
        raise ConfigError(
            f"RewardConfig.function is called as f({', '.join([what, *(f'{key}=...' for key in config.kwargs)])}), which does "
            f"not fit {config.function!r} with the signature {signature}: {error}"
        ) from error


def resolve(config: RewardConfig) -> Callable[..., Any]:
    """The function that scores, its kwargs bound. Imports the user's module (blocks for as long as that takes).

    Raises:
        ConfigError: as `check`; or the module has no such function.
        Exception: whatever the user's module raises when it is imported.
    """
    check(config)
    function = config.function
    if isinstance(function, str) and ":" in function:
        name, _, path = function.partition(":")
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it was found, and lacks something itself
            raise ConfigError(f"RewardConfig.function={function!r}: {error}") from error
        for attribute in path.split("."):
            if not hasattr(found, attribute):
                near = difflib.get_close_matches(attribute, dir(found), n=3)
                hint = f" (did you mean {', '.join(near)}?)" if near else ""
                raise ConfigError(f"RewardConfig.function={function!r}: {found!r} has no {attribute!r}{hint}")
            found = getattr(found, attribute)
        if not callable(found):
            raise ConfigError(f"RewardConfig.function={function!r} must name a function; it is {found!r}")
        _check_arguments(found, config)
        function = found
    elif isinstance(function, str):
        function = _BUILTIN[function]
    return functools.partial(function, **config.kwargs) if config.kwargs else function


# --- the values ---------------------------------------------------------------------------------------------------------


def _where(samples: Sequence[RewardInput]) -> str:
    ticket = samples[0].prompt.ticket if samples else "?"
    return f"ticket {ticket}, " + (f"sample {samples[0].index}" if len(samples) == 1 else f"{len(samples)} samples")


def _number(value: Any, sample: RewardInput) -> float:
    got = value
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # scalars of numpy and torch
    if isinstance(value, numbers.Real):  # bool is one: 0 or 1
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise RewardError(f"{_where([sample])}: a reward must be a finite number; got {got!r:.200} ({type(got).__name__})")


def _numbers(value: Any, samples: Sequence[RewardInput], per: str) -> list[float]:
    if per == "sample":
        return [_number(value, samples[0])]
    if hasattr(value, "tolist"):  # arrays of numpy and torch
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise RewardError(
            f"{_where(samples)}: a group function must return a list of numbers; got {type(value).__name__}"
        )
    if len(value) != len(samples):
        raise RewardError(
            f"{_where(samples)}: a group function must return one reward a sample; got {len(value)}: {value!r:.200}"
        )
    return [_number(item, sample) for item, sample in zip(value, samples, strict=True)]


class _Outcome(msgspec.Struct, array_like=True):
    """What came of a call, as it travels: rewards, or what `RewardError` or `RewardRaised` is made of."""

    rewards: list[float] = []
    refused: str = ""
    raised: str = ""
    traceback_text: str = ""

    def unwrap(self, where: str) -> list[float]:
        if self.refused:
            raise RewardError(self.refused)
        if self.raised:
            raise RewardRaised(f"{where}: {self.raised}", self.traceback_text)
        return self.rewards


def _failure(error: BaseException) -> _Outcome:
    if isinstance(error, RewardError):
        return _Outcome(refused=str(error))
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None  # the first frame is ours
    text = "".join(traceback.format_exception(type(error), error, below))
    return _Outcome(
        raised="".join(traceback.format_exception_only(error)).strip()[:2000], traceback_text=text[-20_000:]
    )


# --- one process --------------------------------------------------------------------------------------------------------


def _serve(connection: socket.socket, pickled: bytes) -> None:
    """A reward process: makes its function, says that it is ready, then answers one call after the other until the end of file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer, which ends its workers in order
    mprollout._inside = "a reward process"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler inherited from SGLang's process would not end a hung call
    function: Callable[..., Any] | None = None
    broken = _Outcome()
    try:
        config: RewardConfig = pickle.loads(pickled)
        if isinstance(config.function, str) and config.function in _NEEDS:
            importlib.import_module(_NEEDS[config.function][0])  # seconds that are no call's
        function = resolve(config)
    except BaseException as error:  # SystemExit too: the calls are told, the process lives to tell them
        broken = _failure(error)
    with connection, connection.makefile("rb") as calls:
        connection.sendall(_frame(b""))
        while calls.peek(1):
            samples: list[RewardInput] = pickle.load(calls)
            outcome = broken
            if function is not None:
                try:
                    value = function(samples if config.per == "group" else samples[0])
                    outcome = _Outcome(rewards=_numbers(value, samples, config.per))
                except BaseException as error:
                    outcome = _failure(error)
            connection.sendall(_frame(msgspec.msgpack.encode(outcome)))


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


class _Process:
    """The pool's end of one reward process. Used by one call at a time; `kill` may come at any moment."""

    def __init__(self, pickled: bytes) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._ready = False
        # not daemonic: reward functions may start processes of their own
        spawn = multiprocessing.get_context("spawn")
        self.process = spawn.Process(target=_serve, args=(theirs, pickled), name="mprollout-reward")
        with theirs:
            self.process.start()

    async def ready(self) -> None:
        """Returns when the process has made its function, or could not; raises EOFError when it died."""
        if not self._ready:
            await self._receive()
            self._ready = True

    async def call(self, samples: list[RewardInput]) -> _Outcome:
        """Raises EOFError, or OSError, when the process died."""
        await asyncio.get_running_loop().sock_sendall(self._socket, pickle.dumps(samples))
        return msgspec.msgpack.decode(await self._receive(), type=_Outcome)

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
    """Runs a reward function for one worker's event loop.

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

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        function = resolve(config)
        target = function.func if isinstance(function, functools.partial) else function
        awaitable = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)
        self._async: Callable[..., Awaitable[Any]] | None = function if awaitable else None
        self._inline = function if config.function == "exact" else None
        self._places = asyncio.Semaphore(config.workers if self._async is None else config.max_concurrency)
        self._pickled = pickle.dumps(config)
        self._idle: list[_Process] = []  # started, and without a call
        self._processes: set[_Process] = set()  # idle or serving
        self._killed: list[SpawnProcess] = []  # not yet reaped
        self._calls: set[asyncio.Task[_Outcome]] = set()
        self._closed = False

    def warm(self) -> None:
        """Start the processes (some milliseconds each; their imports are not waited for). Without it the first call does."""
        if self._async is None and self._inline is None and not self._processes and not self._closed:
            self._idle = [self._start() for _ in range(self._config.workers)]
            # after the first start, so that it runs before multiprocessing's own hook, which joins a hung process for ever
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
            killed.join()  # SIGKILL was sent: no running function is waited for

    async def _score(self, samples: list[RewardInput]) -> list[float]:
        if self._closed:
            raise EngineClosed("the reward pool is closed")
        if self._async is not None:
            return await self._call_async(self._async, samples)
        if self._inline is not None:
            return _numbers(self._inline(samples[0]), samples, "sample")
        return await self._call(samples)

    async def _call_async(self, function: Callable[..., Awaitable[Any]], samples: list[RewardInput]) -> list[float]:
        per = self._config.per
        async with self._places:
            try:
                async with asyncio.timeout(self._config.timeout_s) as deadline:
                    value = await function(samples if per == "group" else samples[0])
            except Exception as error:
                if deadline.expired():
                    limit = f"exceeded timeout_s={self._config.timeout_s}"
                    raise RewardTimeout(f"{_where(samples)}: the reward function {limit}") from error
                return _failure(error).unwrap(_where(samples))  # raises
        return _numbers(value, samples, per)

    async def _call(self, samples: list[RewardInput]) -> list[float]:
        self.warm()
        await self._places.acquire()  # the wait is not timed, and a call cancelled in it costs no process
        if self._closed:
            self._places.release()
            raise EngineClosed("the reward pool is closed")
        process = self._idle.pop() if self._idle else self._start()
        call = asyncio.ensure_future(self._one_call(process, samples))
        self._calls.add(call)
        call.add_done_callback(self._on_call_done)
        try:
            outcome = await asyncio.shield(call)
        except asyncio.CancelledError:
            # Most calls end in a moment, and a kill costs the start of a process: a group's siblings are cancelled by the dozen.
            asyncio.get_running_loop().call_later(CANCEL_GRACE_S, call.cancel)
            raise
        return outcome.unwrap(_where(samples))

    async def _one_call(self, process: _Process, samples: list[RewardInput]) -> _Outcome:
        outcome = None
        try:
            outcome = await self._ask(process, samples)
            return outcome
        finally:
            self._give_back(process, reusable=outcome is not None)
            self._places.release()

    def _on_call_done(self, call: asyncio.Task[_Outcome]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # its waiter may be gone

    async def _ask(self, process: _Process, samples: list[RewardInput]) -> _Outcome:
        limit = f"did not start within {START_TIMEOUT_S} s"
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await process.ready()
            limit = f"exceeded timeout_s={self._config.timeout_s}"
            async with asyncio.timeout(self._config.timeout_s):
                return await process.call(samples)
        except TimeoutError as error:
            raise RewardTimeout(f"{_where(samples)}: the reward function {limit}") from error
        except (EOFError, OSError) as error:
            if self._closed:
                raise EngineClosed("the reward pool was closed while it scored") from error
            process.kill()  # it may have closed its socket and live on
            process.process.join()
            died = f"the reward's process {process.process.pid} died with exit code {process.process.exitcode}"
            raise RewardRaised(f"{_where(samples)}: {died}") from error

    def _give_back(self, process: _Process, reusable: bool) -> None:
        if reusable and not self._closed:
            self._idle.append(process)
            return
        process.discard()
        if not self._closed:
            self._processes.remove(process)
            self._killed.append(process.process)
            for killed in [one for one in self._killed if not one.is_alive()]:  # reaps
                self._killed.remove(killed)
                killed.close()
            with contextlib.suppress(OSError):  # no process to be had now: the next call tries again, and says so
                self._idle.append(self._start())

    def _start(self) -> _Process:
        process = _Process(self._pickled)
        self._processes.add(process)
        return process
