"""The typed errors. Each says what was expected, what came, and where; every one derives from `MprolloutError`.

A worker's traceback travels as text (`worker_traceback`), never as a pickled exception.
"""


class MprolloutError(Exception):
    """Base of all errors that mprollout raises on purpose."""


class ConfigError(MprolloutError, ValueError):
    """A setting breaks its rule: the message names field, rule and value."""


class BiasedLogprobs(ConfigError):
    """The sampling settings make the engine's logprobs differ from the distribution sampled from."""


class MemoryBudgetError(ConfigError):
    """The shared memory asked for does not fit the cgroup's or the machine's limit: names size, limit and remedy."""


class MainGuardMissing(MprolloutError, RuntimeError):
    """An engine is made inside a worker or reward process (it reaches the trainer in a `WorkerStartError`): the script needs `if __name__ == "__main__":`."""


class SourceError(MprolloutError, ValueError):
    """A row cannot be used: names file, line or row number, and the field or the parser's complaint."""


class EngineClosed(MprolloutError, RuntimeError):
    """The engine was closed, or not yet started."""


class ConcurrentGet(MprolloutError, RuntimeError):
    """A second `get` while one is under way: there is one taker at a time."""


class GetTimeout(MprolloutError, TimeoutError):
    """`get(n, timeout)` ran out of time having consumed nothing; names what is there and what each worker does."""


class GateStarved(MprolloutError, RuntimeError):
    """`get(n)` can never be met by the remaining credit: an update, or a smaller n, is needed. Nothing was consumed."""


class EngineAsleep(MprolloutError, RuntimeError):
    """`get(n)` or `evaluate` needs the workers, which sleep until `RolloutEngine.wake`. Nothing was consumed."""


class RingStarved(MprolloutError, RuntimeError):
    """`get(n)` can never be met: batches that were not released hold the memory that the next groups need. Nothing was consumed."""


class DataExhausted(MprolloutError):
    """The source has ended and fewer than n groups remain; `available` of them can still be drained with `get`."""

    def __init__(self, message: str, available: int) -> None:
        super().__init__(message)
        self.available = available


class BatchReleased(MprolloutError, RuntimeError):
    """A view was asked of a batch whose memory was given back."""


class EngineFault(MprolloutError, RuntimeError):
    """A permanent fault, raised by `get`: carries the worker, its pid and exit code, and its traceback as text."""

    def __init__(
        self,
        message: str,
        *,
        worker: int | None = None,
        pid: int | None = None,
        exit_code: int | None = None,
        worker_traceback: str = "",
    ) -> None:
        super().__init__(
            message + (f"\n--- traceback in worker {worker} ---\n{worker_traceback}" if worker_traceback else "")
        )
        self.worker = worker
        self.pid = pid
        self.exit_code = exit_code
        self.worker_traceback = worker_traceback


class WorkerStartError(EngineFault):
    """A worker could not start: its own traceback says why."""


class WorkersLost(EngineFault):
    """All workers died and their restarts are used up."""


class KeeperLost(EngineFault):
    """The keeper process died; everything it owned has ended with it."""


class RewardFault(EngineFault):
    """The reward function fails for every prompt: the traceback is its own."""


class PromptsFailing(EngineFault):
    """Prompt after prompt ends FAILED and nothing is published: the last failure's traceback is carried."""


class WeightUpdateFailed(EngineFault):
    """A weight update was not applied by all workers. The policy version did not advance."""


class RewardError(MprolloutError, ValueError):
    """A reward function returned NaN, no number, or the wrong number of rewards."""


class SampleAborted(MprolloutError):
    """A sample ended without a usable completion: names the sample and the engine's reason."""

    def __init__(self, message: str, by_update: bool = False) -> None:
        super().__init__(message)
        self.by_update = by_update
        """A weight update ended it, so it is nobody's failure."""


class DeadlineExceeded(MprolloutError, TimeoutError):
    """An episode, a sample or an attempt took longer than its deadline in `FaultConfig`: names it, the worker's pid, the setting and its value."""


class SampleFailed(MprolloutError):
    """A sample's rollout or reward function ended in a way that would have ended the worker; names the sample."""


class GroupTooLarge(MprolloutError, ValueError):
    """A group's encoded size exceeds `max_group_bytes`: names both sizes in bytes."""
