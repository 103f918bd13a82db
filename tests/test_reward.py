"""Claims about rewards: what the scorers say, what is refused, and what the pool does with functions that raise, hang or die."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rewards

from mprollout.config import RewardConfig, SourceConfig
from mprollout.errors import ConfigError, EngineClosed, RewardError
from mprollout.reward import RewardInput, RewardRaised, RewardTimeout, check, resolve
from mprollout.reward_pool import RewardPool
from mprollout.source import Prompt, PromptSource


def sample(text: str = "", answer: Any = None, index: int = 0, **fields: Any) -> RewardInput:
    prompt = Prompt(ticket=12, row=3, epoch=0, prompt="?", answer=answer, fields=fields)
    return RewardInput(prompt=prompt, text=text, token_ids=[1, 2], finish_reason="stop", index=index)


# --- running a pool ---


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "fifo.go")
    return tmp_path / "fifo"


async def met(path: Path | str, mode: str) -> None:
    """Opening a pipe returns when the other end is opened too."""
    (await asyncio.to_thread(open, path, mode)).close()


@pytest.fixture
def pools() -> Iterator[Callable[..., RewardPool]]:
    made: list[RewardPool] = []

    def make(function: Any, **settings: Any) -> RewardPool:
        made.append(RewardPool(RewardConfig(function, **settings)))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def run(awaitable: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(awaitable, 60)

    return asyncio.run(main())


def kill(pid: int) -> None:
    """Returns when the child is dead, and leaves it to be reaped."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def outcomes(*calls: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


# --- scorers ---


def test_exact_compares_stripped_text() -> None:
    exact = resolve(RewardConfig("exact"))
    assert exact(sample(" 42\n", 42)) == 1.0
    assert exact(sample("42.", "42")) == 0.0


def test_regex_compares_the_last_match_or_only_looks() -> None:
    regex = resolve(RewardConfig("regex", kwargs={"pattern": r"answer: (\w+)"}))
    assert regex(sample("answer: a, no, answer: b", "b")) == 1.0
    assert regex(sample("answer: b, no, answer: a", "b")) == 0.0
    assert regex(sample("nothing", "b")) == 0.0
    assert (regex(sample("answer: x")), regex(sample("x"))) == (1.0, 0.0)
    assert resolve(RewardConfig("regex", kwargs={"pattern": r"\d+"}))(sample("it is 7", 7)) == 1.0


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"so \boxed{1/2}", r"\frac{1}{2}", 1.0),
        (r"first \boxed{3}. Wait, that is wrong: \boxed{4}", 4, 1.0),
        (r"first \boxed{4}. Wait, that is wrong: \boxed{3}", 4, 0.0),
        ("The answer is 1,234.", "1234", 1.0),
        ("The answer is 72", "He sold 48/2 clips.\n#### 72", 1.0),
        (r"$x^2 + 2x + 1$", "$(x+1)^2$", 1.0),
        (r"\boxed{(1, 2)}", r"\boxed{(1,2)}", 1.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
        (r"\boxed{", "4", 0.0),
    ],
)
def test_math_reads_boxes_latex_and_plain_numbers(text: str, answer: Any, reward: float) -> None:
    assert resolve(RewardConfig("math"))(sample(text, answer)) == reward


@pytest.mark.parametrize("name", ["math", "exact"])
def test_a_row_without_an_answer_is_an_error_and_not_a_zero(name: str) -> None:
    with pytest.raises(RewardError, match="ticket 12, sample 0: the row has no answer"):
        resolve(RewardConfig(name))(sample("4"))


def test_row_is_scored_by_the_data_sets_own_scorer(pools: Any) -> None:
    """`rearc` compares tuples, which msgpack makes lists of: the scorer must see the row as it was made. And without a
    seed, reasoning-gym would draw another one, and so other rows, in every process.
    """
    pool = pools("row")

    async def scores(prompt: Prompt) -> list[float]:
        texts = [f"<think>0</think><answer>\n{prompt.answer}</answer>", f" {prompt.answer}\n", "<answer>no</answer>"]
        return [
            await pool.score_one(RewardInput(prompt=prompt, text=text, token_ids=[], finish_reason="stop", index=0))
            for text in texts
        ]

    async def scores_of_each() -> list[list[float]]:
        sources = [SourceConfig(reasoning_gym=name, reasoning_gym_args={"size": 2}) for name in ("rearc", "chain_sum")]
        return [await scores(Prompt.decode(PromptSource(source).encode(1))) for source in sources]

    for right, bare, wrong in run(scores_of_each()):
        assert (right, bare) == (1.0, 1.0)
        assert wrong < 0.2


def test_row_without_a_scorer_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"set SourceConfig\.reasoning_gym"):
        resolve(RewardConfig("row"))(sample("4"))


# --- settings ---


@pytest.mark.parametrize(
    ("function", "settings", "complaint"),
    [
        ("maths", {}, r"must be one of 'exact', 'math', 'regex', 'row'.* \(did you mean 'math'\?\)"),
        ("math", {"kwargs": {"x": 1}}, "does not fit 'math'"),
        ("math", {"per": "group"}, 'per must be "sample"'),
        ("regex", {}, "missing a required"),
        ("regex", {"kwargs": {"pattern": "("}}, "pattern.*unterminated"),
        ("no_such_module:f", {}, "no module 'no_such_module'"),
        ("a-b:f", {}, 'must be "module:function"'),
        (7, {}, "must be a name or a function; got 7"),
        (lambda sample: 1.0, {}, r"no lambda.*RewardConfig\.kwargs"),
        (rewards.scaled, {"kwargs": {"times": 2}}, r"called as f\(sample, times=\.\.\.\)"),
        (rewards.scaled, {}, "missing a required argument: 'by'"),
    ],
)
def test_check_refuses_before_anything_starts(function: Any, settings: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check(RewardConfig(function, **settings))


def test_check_refuses_a_closure_and_says_what_to_do() -> None:
    limit = 3

    def closure(sample: RewardInput) -> float:
        return float(len(sample.text) < limit)

    with pytest.raises(ConfigError, match=r"top level of a module.*hand it what it closes over"):
        check(RewardConfig(closure))


def test_check_does_not_import_the_users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check(RewardConfig("my_rewards:f"))
    with pytest.raises(RuntimeError, match="imported"):
        resolve(RewardConfig("my_rewards:f"))


def test_an_interactive_function_is_refused() -> None:
    code = (
        "from mprollout.reward import check; from mprollout.config import RewardConfig\n"
        "def f(sample): return 1.0\n"
        "check(RewardConfig(f))\n"
    )
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True)
    assert "interactive session" in done.stderr


def test_resolve_names_what_a_module_lacks() -> None:
    with pytest.raises(ConfigError, match=r"has no 'sqroot' \(did you mean sqrt"):
        resolve(RewardConfig("math:sqroot"))
    with pytest.raises(ConfigError, match=r"No module named 'json\.nothing'"):
        resolve(RewardConfig("json.nothing:f"))
    with pytest.raises(ConfigError, match="must name a function"):
        resolve(RewardConfig("math:pi"))


def test_kwargs_are_passed_with_every_call(pools: Any) -> None:
    pool = pools(rewards.scaled, kwargs={"by": 0.5})
    assert run(pool.score_one(sample("abc"))) == 1.5


# --- values ---


def test_only_finite_numbers_are_rewards(pools: Any) -> None:
    """CASES C48: NaN is an error that names the sample, never 0."""
    good = {
        "1": 1.0,
        "True": 1.0,
        "False": 0.0,
        "-0.25": -0.25,
        "np.float32(0.5)": 0.5,
        "np.True_": 1.0,
        "np.array(2)": 2.0,
    }
    bad = ["math.nan", "math.inf", "np.float32('nan')", "10**400", "None", "'1'", "[1.0]", "1j", "np.ones(2)", "{}"]
    pool = pools(rewards.value)

    async def scores() -> list[Any]:
        return await outcomes(*(pool.score_one(sample(text, index=5)) for text in [*good, *bad]))

    results = run(scores())
    assert results[: len(good)] == list(good.values())
    for text, result in zip(bad, results[len(good) :], strict=True):
        assert type(result) is RewardError, text
        assert "ticket 12, sample 5: a reward must be a finite number; got" in str(result)


def test_a_group_gets_one_reward_a_sample(pools: Any) -> None:
    pool = pools(rewards.group_value, per="group", workers=1)

    def group(text: str) -> list[RewardInput]:
        return [sample(text, index=index) for index in range(3)]

    async def scores() -> list[Any]:
        texts = ["[one.index for one in samples]", "np.arange(3) / 2", "[1, 2]", "7", "[0, 0, math.nan]"]
        return await outcomes(*(pool.score(group(text)) for text in texts))

    first, second, few, number, nan = run(scores())
    assert (first, second) == ([0.0, 1.0, 2.0], [0.0, 0.5, 1.0])
    assert "ticket 12, 3 samples: a group function must return one reward a sample; got 2: [1, 2]" in str(few)
    assert "must return a list of numbers; got int" in str(number)
    assert "ticket 12, sample 2: a reward must be a finite number; got nan" in str(nan)


# --- functions that raise, hang, die ---


def test_a_raising_function_carries_its_traceback(pools: Any) -> None:
    """slime#2399, miles#1717: the function's own traceback is what the user sees, and the process lives on."""
    pool = pools(rewards.act)

    async def scores() -> list[Any]:
        return await outcomes(*(pool.score_one(sample(text)) for text in ("pid", "raise", "exit", "pid")))

    before, raised, exited, after = run(scores())
    assert type(raised) is RewardRaised
    assert "ticket 12, sample 0: KeyError: 'the judge is broken'" in str(raised)
    assert 'rewards.py", line' in raised.traceback_text
    assert raised.traceback_text.count("File ") == 1  # its own frames alone
    assert "SystemExit: 3" in str(exited)
    assert before == after


def test_one_hung_sample_affects_only_itself(pools: Any) -> None:
    """slime#1361: one sample exceeds the deadline; its siblings get their rewards."""
    pool = pools(rewards.act, workers=2, timeout_s=0.5)

    async def scores() -> list[Any]:
        return await outcomes(*(pool.score_one(sample("hang" if i == 1 else "", index=i)) for i in range(6)))

    results = run(scores())
    assert type(results.pop(1)) is RewardTimeout
    assert results == [1.0] * 5


def test_a_hung_verifier_is_killed_and_the_pool_is_full_again(pools: Any, fifo: Path) -> None:
    """AReaL#1426, verl#5839: afterwards two calls still run at the same time, which each waits for."""
    pool = pools(rewards.act, workers=2, timeout_s=1.0)

    async def scores() -> tuple[list[Any], list[Any]]:
        hung = await outcomes(*(pool.score_one(sample("hang", index=i)) for i in range(2)))
        return hung, await outcomes(*(pool.score_one(sample(f"meet {fifo}", index=i)) for i in range(2)))

    hung, met = run(scores())
    assert [str(one) for one in hung] == [
        f"ticket 12, sample {i}: the reward function exceeded timeout_s=1.0" for i in range(2)
    ]
    assert met == [1.0, 1.0]


def test_c_code_that_holds_the_gil_is_killed(pools: Any) -> None:
    """verl#5839: a catastrophic pattern never returns to the interpreter, so no signal handler would run."""
    pool = pools("regex", kwargs={"pattern": r"(a+)+$"}, timeout_s=0.3)

    async def scores() -> list[Any]:
        return await outcomes(*(pool.score_one(sample(text)) for text in ("a" * 60 + "b", "aaa")))

    hung, after = run(scores())
    assert type(hung) is RewardTimeout
    assert after == 1.0


def test_waiting_for_a_place_is_not_timed(pools: Any) -> None:
    """Four calls of 0.2 s on one process take 0.8 s, and none exceeds 0.6 s; nor is the start of a process counted."""
    pool = pools(rewards.act, workers=1, timeout_s=0.6)

    async def scores() -> list[Any]:
        return await outcomes(*(pool.score_one(sample("work 0.2")) for _ in range(4)))

    assert run(scores()) == [1.0] * 4


@pytest.mark.parametrize("idle", [False, True])
def test_a_dead_reward_process_is_replaced(pools: Any, idle: bool) -> None:
    """A function that crashes the interpreter, or the OOM killer meeting an idle process, costs one call."""
    pool = pools(rewards.act)

    async def scores() -> list[Any]:
        pid = await pool.score_one(sample("pid"))
        if idle:
            kill(int(pid))
        return await outcomes(pool.score_one(sample("die")), pool.score_one(sample()))

    died, after = run(scores())
    assert type(died) is RewardRaised
    assert "died with exit code -9" in str(died)
    assert after == 1.0


def test_cancelling_a_call_kills_only_its_own_process(pools: Any, fifo: Path) -> None:
    """slime#2176: what is cancelled stops running; what only waited for a place costs no process."""
    pool = pools(rewards.act, workers=1)

    async def scores() -> tuple[list[float], list[Any]]:
        pids = [await pool.score_one(sample("pid"))]
        running = asyncio.create_task(pool.score_one(sample(f"hold {fifo}")))
        await met(fifo, "rb")
        waiting = asyncio.create_task(pool.score_one(sample("raise")))
        await asyncio.sleep(0)  # let it begin to wait
        waiting.cancel()
        await met(f"{fifo}.go", "wb")
        assert await running == 1.0
        pids.append(await pool.score_one(sample("pid")))
        running = asyncio.create_task(pool.score_one(sample(f"hold {fifo}")))
        await met(fifo, "rb")
        running.cancel()
        cancelled = await outcomes(waiting, running)
        pids.append(await pool.score_one(sample("pid")))
        return pids, cancelled

    pids, cancelled = run(scores())
    assert [type(one) for one in cancelled] == [asyncio.CancelledError] * 2
    assert pids[0] == pids[1] != pids[2]


def test_close_kills_at_once_and_tells_those_who_wait(pools: Any, fifo: Path) -> None:
    """slime#2176: a judge that would run for 1000 s does not delay the end."""
    pool = pools(rewards.act, workers=1, timeout_s=1000)

    async def scores() -> tuple[float, list[Any]]:
        running = asyncio.create_task(pool.score_one(sample(f"hold {fifo}")))
        await met(fifo, "rb")
        waiting = asyncio.create_task(pool.score_one(sample("hang")))
        await asyncio.sleep(0)
        start = time.perf_counter()
        pool.close()
        closing = time.perf_counter() - start
        return closing, await outcomes(running, waiting, pool.score_one(sample()))

    closing, results = run(scores())
    assert closing < 1
    assert [type(one) for one in results] == [EngineClosed] * 3


def test_a_module_that_cannot_be_imported_says_so_with_every_call(
    pools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has it imported already; the reward process fails to, and tells why instead of dying."""
    path = tmp_path / "fragile_rewards.py"
    path.write_text("def reward(sample): return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = pools("fragile_rewards:reward")
    path.write_text("def reward(sample):\n    return 1.0\n\nraise OSError('no licence')\n")

    async def scores() -> list[Any]:
        return await outcomes(*(pool.score_one(sample()) for _ in range(2)))

    for result in run(scores()):
        assert type(result) is RewardRaised
        assert "OSError: no licence" in result.traceback_text


# --- on the loop ---


def test_async_functions_run_on_the_loop_with_a_deadline(pools: Any) -> None:
    pool = pools(rewards.judge, timeout_s=0.2, max_concurrency=2)

    async def scores() -> list[Any]:
        texts = ["hang", "hang", "raise", "own timeout", ""]
        return await outcomes(*(pool.score_one(sample(text, index=i)) for i, text in enumerate(texts)))

    hung, hung_too, raised, own, fine = run(scores())
    assert (type(hung), type(hung_too)) == (RewardTimeout, RewardTimeout)
    assert "KeyError: 'the judge is broken'" in raised.traceback_text
    assert "TimeoutError: the judge's own" in str(own)
    assert type(own) is RewardRaised
    assert fine == 0.5
    assert not pool._processes


def test_an_async_object_scores_a_group(pools: Any) -> None:
    pool = pools(rewards.Judge(), per="group")
    assert run(pool.score([sample(index=0), sample(index=1)])) == [0.0, 1.0]


def test_exact_starts_no_process(pools: Any) -> None:
    pool = pools("exact")
    pool.warm()
    assert run(pool.score_one(sample("7", 7))) == 1.0
    assert not pool._processes


def test_async_calls_under_way_are_bounded(pools: Any) -> None:
    pool = pools(rewards.judge, max_concurrency=1, timeout_s=0.05)

    async def scores() -> list[Any]:
        return await outcomes(*(pool.score_one(sample(text)) for text in ("hang", "")))

    hung, fine = run(scores())  # the second waited longer than the deadline, which is not counted
    assert type(hung) is RewardTimeout
    assert fine == 0.5


# --- functions of the user's script ---

_SCRIPT = """
import pickle, subprocess, sys
from mprollout.config import RewardConfig
from mprollout.reward import RewardInput, check

def reward(sample: RewardInput, *, bonus: float) -> float:
    return len(sample.text) + bonus

if __name__ == "__main__":
    config = RewardConfig(reward, kwargs={"bonus": 0.5})
    check(config)
    sys.exit(subprocess.run([sys.executable, sys.argv[1], __file__], input=pickle.dumps(config)).returncode)
"""

_WORKER = """
import asyncio, pickle, sys
from multiprocessing.spawn import import_main_path
from mprollout.reward import RewardInput
from mprollout.reward_pool import RewardPool
from mprollout.source import Prompt

def main() -> None:
    import_main_path(sys.argv[1])  # what a worker does: the script becomes __mp_main__ and __main__
    pool = RewardPool(pickle.load(sys.stdin.buffer))
    prompt = Prompt(ticket=0, row=0, epoch=0, prompt="?")
    sample = RewardInput(prompt=prompt, text="abc", token_ids=[], finish_reason="stop", index=0)
    print("reward", asyncio.run(pool.score_one(sample)))
    pool.close()

if __name__ == "__main__":
    main()
"""


def test_a_function_of_the_users_script_is_found(tmp_path: Path) -> None:
    """It is pickled as `__main__.reward` by the trainer, and found in the worker and in the reward process."""
    script, worker = tmp_path / "train.py", tmp_path / "worker.py"
    script.write_text(_SCRIPT)
    worker.write_text(_WORKER)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script), str(worker)], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "reward 3.5", done.stderr


def test_a_pool_that_is_never_closed_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    code = (
        "from mprollout.reward_pool import RewardPool; from mprollout.config import RewardConfig\n"
        "pool = RewardPool(RewardConfig('math')); pool.warm(); print(len(pool._processes))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_samples_pickle_as_they_are() -> None:
    one = sample("x", answer=(1, 2), deep={"a": [1]})
    assert pickle.loads(pickle.dumps(one)) == one
