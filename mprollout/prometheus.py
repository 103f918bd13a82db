"""The numbers of `mprollout top` as a Prometheus endpoint: `mprollout top RUN --prometheus 9400`, in a process outside of the run.

    GET /metrics --> RunCollector.collect: RunView.look, the run's shared memory at that moment --> text

Nothing is sampled between scrapes, and a run that nobody scrapes pays nothing. `grafana.json`, beside this file, is a dashboard of these names.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprollout.errors import ConfigError
from mprollout.monitor import RunEnded, RunView
from mprollout.ring import LAGS

if TYPE_CHECKING:
    from prometheus_client.core import Metric

DASHBOARD = Path(__file__).with_name("grafana.json")
"""To be imported in Grafana."""

_GAUGES = {
    "policy_version": "Last version that all workers applied",
    "live": "Groups admitted and not yet taken or ended",
    "pending": "Groups published and not yet taken up by the trainer",
    "held": "Groups taken up that wait for their turn",
    "reward_last": "Mean reward of the samples in the last batch",
    "reward_mean": "Mean reward of all samples taken",
    "waiting_s": "Seconds that the get under way has waited; 0: none waits",
    "progress_s": "Seconds since a worker last finished a sample or an update",
}
_COUNTERS = {
    "updates": "Completed weight updates",
    "admitted": "Tickets admitted",
    "taken": "Groups taken by the trainer",
    "groups_masked": "Groups delivered with their loss masked",
    "groups_recycled": "Groups discarded and sampled again, for their lag",
    "tokens_delivered": "Tokens of groups taken",
}
_WORKER_GAUGES = {
    "running_samples": "Samples generating",
    "rewarding_samples": "Samples being scored",
    "version": "Policy version that the worker samples from",
}
_WORKER_COUNTERS = {
    "tokens_generated": "Tokens of samples whose generation finished, evaluations included",
    "samples_finished": "Samples whose generation finished",
    "groups_published": "Groups published",
    "retried": "Attempts that were tried again",
    "restarts": "Restarts of the worker",
}
_NAMES = {
    "live": "live_groups",
    "pending": "pending_groups",
    "held": "held_groups",
    "waiting_s": "trainer_waiting_seconds",
    "progress_s": "progress_age_seconds",
    "admitted": "groups_admitted",
    "taken": "groups_taken",
    "version": "worker_policy_version",
    "retried": "attempts_retried",
    "restarts": "worker_restarts",
}
"""Where a name alone, without its place in a table, would not say what it counts, or lacks its unit."""


class RunCollector:
    """A collector for `prometheus_client`: one look at the run a scrape. Any thread."""

    def __init__(self, run: Path) -> None:
        self._view, self._lock = RunView(run), threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """All metrics of this moment; `mprollout_up` 0 alone when the run has ended."""
        from prometheus_client.core import GaugeMetricFamily

        try:
            with self._lock:
                now = self._view.look()
        except RunEnded:
            yield GaugeMetricFamily("mprollout_up", "Whether the run is kept by a living process", 0)
            return
        yield GaugeMetricFamily("mprollout_up", "Whether the run is kept by a living process", 1)
        yield from _of_the_run(now)
        yield from _of_the_workers(now["workers"])
        yield from _histograms(now)

    def close(self) -> None:
        """Unmap the run's memory."""
        with self._lock:
            self._view.close()


@contextlib.contextmanager
def serving(run: Path, port: int, address: str) -> Iterator[str]:
    """Serve a run's metrics while this is open. Yields the endpoint's URL.

    Args:
        port: 0: any that is free.
        address: to listen at.

    Raises:
        RunEnded: nobody keeps the run.
        ConfigError: prometheus-client is not installed, or nothing can listen there.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ConfigError(
            f'--prometheus needs prometheus-client ({error}): pip install "mprollout[prometheus]"'
        ) from error
    collector, registry = RunCollector(run), CollectorRegistry()
    try:
        registry.register(collector)
        try:
            server, thread = start_http_server(port, addr=address, registry=registry)
        except OSError as error:
            raise ConfigError(f"--prometheus {port}: nothing can listen at {address}:{port}: {error}") from error
        try:
            yield f"http://{address}:{server.server_port}/metrics"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
    finally:
        collector.close()


def _of_the_run(now: Mapping[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for key, text in _GAUGES.items():
        yield GaugeMetricFamily(f"mprollout_{_NAMES.get(key, key)}", text, now[key])
    for key, text in _COUNTERS.items():
        yield CounterMetricFamily(f"mprollout_{_NAMES.get(key, key)}", text, now[key])
    yield GaugeMetricFamily("mprollout_trainer_attached", "Whether a trainer is there", int(now["trainer_pid"] != 0))
    oldest = now["straggler"]
    age_s = oldest["since_s"] if oldest is not None else 0.0
    yield GaugeMetricFamily("mprollout_straggler_age_seconds", "Since the oldest ticket being made was claimed", age_s)
    for name, text, label, counts in (
        ("groups_ended", "Tickets ended otherwise than taken", "reason", now["ended_by"]),
        ("tokens_discarded", "Tokens sampled and never delivered", "reason", now["discarded"]),
        ("trainer_wait_seconds", "Seconds that the trainer waited, of waits that are over", "cause", now["waited_s"]),
    ):
        counter = CounterMetricFamily(f"mprollout_{name}", text, labels=[label])
        for key, count in counts.items():
            counter.add_metric([key], count)
        yield counter


def _of_the_workers(workers: list[dict[str, Any]]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for kind, names in ((GaugeMetricFamily, _WORKER_GAUGES), (CounterMetricFamily, _WORKER_COUNTERS)):
        for key, text in names.items():
            metric = kind(f"mprollout_{_NAMES.get(key, key)}", text, labels=["worker"])
            for worker in workers:
                metric.add_metric([str(worker["worker"])], worker[key])
            yield metric
    ready = GaugeMetricFamily("mprollout_worker_ready", "Whether the worker samples", labels=["worker"])
    for worker in workers:
        ready.add_metric([str(worker["worker"])], int(worker["state"] == "ready"))
    yield ready


def _histograms(now: Mapping[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import HistogramMetricFamily

    lags = HistogramMetricFamily("mprollout_group_lag", "Updates between sampling and take of the groups taken")
    most = len(LAGS) - 1
    total = sum(lag * count for lag, count in now["lags"].items())
    lags.add_metric(
        [], _cumulative({lag: n for lag, n in now["lags"].items() if lag < most}, range(most), now["lags"]), total
    )
    yield lags
    lengths = HistogramMetricFamily("mprollout_sample_tokens", "Length of training samples", labels=["stage"])
    for stage in ("issued", "delivered"):
        counts = now[f"lengths_{stage}"]
        ends = {2 * shortest - 1: count for shortest, count in counts.items()}
        sum_ = now["tokens_delivered"] if stage == "delivered" else None
        lengths.add_metric([stage], _cumulative(ends, [(2 << i) - 1 for i in range(17)], counts), sum_)
    yield lengths


def _cumulative(counts: Mapping[int, int], bounds: Any, all_of_them: Mapping[int, int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus has them: so many up to each bound."""
    buckets = [(str(float(bound)), float(sum(n for key, n in counts.items() if key <= bound))) for bound in bounds]
    return [*buckets, ("+Inf", float(sum(all_of_them.values())))]
