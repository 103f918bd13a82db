"""The plots of a report, as plotly figures, and the page that holds them: one HTML file that loads nothing.

    history.Life, ... --Course--> intervals on one axis of seconds --> figures --page--> HTML with plotly's script in it

Invariant: text of a run (completions, errors) reaches the page through `html.escape` or plotly's own JSON, and is never markup.
"""

from __future__ import annotations

import html
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mprollout.errors import ConfigError
from mprollout.history import EVERY_S, End, Evaluated, Life, Logged, Row, Update, WorkerChange
from mprollout.waiting import CAUSES

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_POINTS = 500
MOST_BARS = 80
_STATES = {
    "starting": "#c7c7c7",
    "syncing": "#9ecae1",
    "ready": "#2ca02c",
    "evaluating": "#98df8a",
    "asleep": "#c5b0d5",
    "restarting": "#ff7f0e",
    "lost": "#7f0000",
}
_CAUSES = dict(zip(CAUSES, ("#1f77b4", "#ff7f0e", "#9467bd", "#7f0000", "#7f7f7f", "#17becf"), strict=True))


class Interval(NamedTuple):
    """From one row of a life to a later one."""

    start_s: float
    """Since the first engine's start, as all times here."""
    end_s: float
    before: Row
    after: Row

    def rate(self, name: str) -> float:
        """Of a total, a second."""
        return float(getattr(self.after, name) - getattr(self.before, name)) / (self.end_s - self.start_s)

    def gained(self, name: str) -> dict[Any, Any]:
        """Of totals by name."""
        before = getattr(self.before, name)
        return {key: value - before.get(key, 0) for key, value in getattr(self.after, name).items()}

    @property
    def reward(self) -> float | None:
        """Mean of the samples taken in it."""
        first, last = (sum(row.lengths_delivered.values()) for row in (self.before, self.after))
        if last <= first:
            return None
        return (self.after.reward_mean * last - self.before.reward_mean * first) / (last - first)


class Course:
    """The lives of a run's engines, one after the other."""

    def __init__(self, lives: Sequence[Life]) -> None:
        self.lives = lives
        self._origin = lives[0].start.at

    def time(self, life: Life, t: float) -> float:
        """Seconds since the first engine's start."""
        return life.start.at - self._origin + t

    def end(self, life: Life) -> float:
        """When it was last heard of."""
        return self.time(life, life.lines[-1].t if life.lines else 0.0)

    def events(self, kind: type[Any]) -> list[tuple[float, Any]]:
        """All lines of a kind with their times."""
        return [(self.time(life, line.t), line) for life in self.lives for line in life.of(kind)]

    def intervals(self, most: int = MOST_POINTS) -> list[list[Interval]]:
        """Of each life, between at most so many rows; the first is from its start."""
        found: list[list[Interval]] = []
        for life in self.lives:
            rows = life.of(Row)
            if len(rows) < 2:
                found.append([])
                continue
            step_s = max((rows[-1].t - rows[0].t) / most, EVERY_S)
            kept = [rows[0]]
            for row in rows[1:]:
                if row.t >= kept[-1].t + step_s:
                    kept.append(row)
            if kept[-1] is not rows[-1]:  # what is left at the end is too short for a rate of its own
                kept[max(1, len(kept) - 1) :] = [rows[-1]]
            pairs = itertools.pairwise(kept)
            found.append([Interval(self.time(life, a.t), self.time(life, b.t), a, b) for a, b in pairs if b.t > a.t])
        return found

    def totals(self, name: str) -> dict[Any, Any]:
        """The totals by name at the end, of all lives together."""
        sums: dict[Any, Any] = {}
        for life in self.lives:
            rows = life.of(Row)
            for key, value in (getattr(rows[-1], name) if rows else {}).items():
                sums[key] = sums.get(key, 0) + value
        return sums

    def total(self, name: str) -> int:
        """A total at the end, of all lives together."""
        return sum(getattr(rows[-1], name) for life in self.lives if (rows := life.of(Row)))


class Plot(NamedTuple):
    """A figure and what it says. None: there was nothing to draw, and `about` says why."""

    name: str
    title: str
    figure: go.Figure | None
    about: str


def run_plots(course: Course) -> list[Plot]:
    """All plots of a run, in the order of the page."""
    plots = [
        _reward(course),
        _accuracy(course),
        _lag(course),
        _depth(course),
        _lengths(course),
        _tokens(course),
        _waits(course),
        _timeline(course),
    ]
    whole = [0.0, course.end(course.lives[-1])]
    for plot in plots:
        if plot.figure is not None and plot.figure.layout.xaxis.title.text == _TIME:
            plot.figure.update_xaxes(range=whole)  # the same for all, so that they can be compared
    return plots


def figure(x: str, y: str, **layout: Any) -> go.Figure:
    """An empty one in the house's style.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ConfigError(f'plots need plotly ({error}): pip install "mprollout[report]"') from error
    settings: dict[str, Any] = {
        "template": "plotly_white",
        "height": 320,
        "margin": {"l": 60, "r": 20, "t": 20, "b": 50},
        "xaxis_title": x,
        "yaxis_title": y,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "hovermode": "x unified",
    }
    return go.Figure(layout={**settings, **layout})


_TIME = "seconds since the engine's start"


def _line(
    fig: go.Figure, course: Course, name: str, value: Callable[[Interval], float | None], **style: Any
) -> list[float]:
    """One value an interval, at its end; a gap between lives. Returns the values."""
    xs: list[float] = []
    ys: list[float | None] = []
    for life in course.intervals():
        for interval in life:
            if (y := value(interval)) is not None:
                xs.append(interval.end_s)
                ys.append(y)
        if xs:
            xs.append(xs[-1])
            ys.append(None)
    fig.add_scatter(x=xs, y=ys, name=name, **style)
    return [y for y in ys if y is not None]


def _reward(course: Course) -> Plot:
    fig = figure(_TIME, "mean reward")
    style = {"mode": "lines+markers", "marker": {"size": 4}, "line": {"width": 1}, "opacity": 0.4}
    values = _line(fig, course, "of the samples taken", lambda i: i.reward, **style)
    mean, weight = 0.0, 0.0

    def smooth(interval: Interval) -> float | None:
        nonlocal mean, weight
        if (reward := interval.reward) is None:
            return None
        mean, weight = 0.9 * mean + 0.1 * reward, 0.9 * weight + 0.1
        return mean / weight

    _line(fig, course, "moving average", smooth, mode="lines", line={"width": 3, "color": "#1f77b4"})
    about = "Of the samples that the trainer took."
    return Plot("reward", "Reward", fig if values else None, about if values else "No group was taken.")


def _accuracy(course: Course) -> Plot:
    fig = figure(_TIME, "accuracy, reward")
    logged = [(t, line) for t, line in course.events(Logged) if "accuracy" in line.metrics]
    if logged:
        fig.add_scatter(
            x=[t for t, _ in logged],
            y=[line.metrics["accuracy"] for _, line in logged],
            text=[f"step {line.step}" for _, line in logged],
            name="accuracy, as the trainer logged it",
            mode="lines+markers",
        )
    evaluated = course.events(Evaluated)
    drawn = bool(logged or evaluated)
    if evaluated:
        fig.add_scatter(
            x=[t for t, _ in evaluated],
            y=[line.reward_mean for _, line in evaluated],
            text=[f"version {line.version}" for _, line in evaluated],
            name="mean reward of engine.evaluate",
            mode="lines+markers",
        )
    about = "On held-out rows: what the trainer logged as `accuracy`, and the mean reward of each evaluation."
    none = "Nothing was evaluated: engine.evaluate(rows), or engine.log(step, {'accuracy': ...})."
    return Plot("accuracy", "Held-out accuracy", fig if drawn else None, about if drawn else none)


def _lag(course: Course) -> Plot:
    def mean(interval: Interval) -> float | None:
        gained = interval.gained("lags")
        groups = sum(gained.values())
        return sum(lag * count for lag, count in gained.items()) / groups if groups > 0 else None

    def highest(interval: Interval) -> float | None:
        return max((lag for lag, count in interval.gained("lags").items() if count > 0), default=None)

    fig = figure(_TIME, "updates")
    values = _line(fig, course, "mean", mean, mode="lines+markers", marker={"size": 4})
    _line(fig, course, "highest", highest, mode="markers", marker={"size": 6, "symbol": "line-ew-open"})
    about = "Updates between the sampling of a group's oldest token and its take."
    return Plot("lag", "Lag", fig if values else None, about if values else "No group was taken.")


def _depth(course: Course) -> Plot:
    fig = figure(_TIME, "groups")
    for name, label in (
        ("live", "live"),
        ("pending", "pending (published, not yet taken up)"),
        ("held", "held for their order"),
    ):
        drawn = _line(fig, course, label, operator.attrgetter(f"after.{name}"), mode="lines", line={"shape": "hv"})
    about = "Groups that wait for the trainer, and all that are under way."
    return Plot("pending", "Pending depth", fig if drawn else None, about if drawn else "No numbers were written.")


def _lengths(course: Course) -> Plot:
    fig = figure("tokens in a sample", "share of samples", barmode="group", hovermode="closest")
    found = {name: course.totals(f"lengths_{name}") for name in ("issued", "delivered")}
    buckets = sorted(set(found["issued"]) | set(found["delivered"]))
    for name, counts in found.items():
        whole = max(1, sum(counts.values()))
        fig.add_bar(
            x=[f"{n} - {2 * n - 1}" if n > 1 else "0 - 1" for n in buckets],
            y=[counts.get(n, 0) / whole for n in buckets],
            text=[f"{counts.get(n, 0):,}" for n in buckets],
            name=name,
        )
    fig.update_layout(xaxis_type="category")
    about = "Of all samples whose generation finished, and of those that were taken: where the two differ, lengths are favoured."
    return Plot("lengths", "Response length", fig if buckets else None, about if buckets else "No sample was finished.")


def _tokens(course: Course) -> Plot:
    fig = figure(_TIME, "tokens a second")
    fill = {"mode": "lines", "line": {"width": 1.5}}
    drawn = _line(fig, course, "generated", lambda i: i.rate("tokens_generated"), **fill)
    _line(fig, course, "delivered", lambda i: i.rate("tokens_delivered"), **fill)
    about = "Of samples whose generation finished (evaluations included), and of samples taken."
    return Plot("tokens", "Tokens a second", fig if drawn else None, about if drawn else "No numbers were written.")


def _waits(course: Course) -> Plot:
    fig = figure(_TIME, "share of the time", barmode="stack", bargap=0, yaxis_tickformat=".0%")
    intervals = [interval for life in course.intervals(MOST_BARS) for interval in life]
    whole = course.totals("waited_s")
    for cause, color in _CAUSES.items():
        if whole.get(cause):
            fig.add_bar(
                x=[(i.start_s + i.end_s) / 2 for i in intervals],
                width=[i.end_s - i.start_s for i in intervals],
                y=[i.gained("waited_s").get(cause, 0.0) / (i.end_s - i.start_s) for i in intervals],
                name=f"{cause} ({whole[cause]:.1f} s)",
                marker={"color": color, "line": {"width": 0}},
            )
    about = "What the trainer waited for, in `get` and in `update_weights`. A wait is booked when it ends, so a bar may exceed its width."
    waited = any(whole.values())
    return Plot("waits", "The trainer's wait", fig if waited else None, about if waited else "It never waited.")


def _timeline(course: Course) -> Plot:
    spans: dict[str, list[tuple[str, float, float, str]]] = {}
    deaths: list[tuple[str, float, str]] = []
    for life in course.lives:
        by_worker: dict[int, list[WorkerChange]] = {}
        for change in life.of(WorkerChange):
            by_worker.setdefault(change.worker, []).append(change)
        for worker, changes in sorted(by_worker.items()):
            name, ends = f"worker {worker}", [*(course.time(life, c.t) for c in changes[1:]), course.end(life)]
            for change, end in zip(changes, ends, strict=True):
                start = course.time(life, change.t)
                spans.setdefault(change.state, []).append((name, start, end - start, f"pid {change.pid}"))
                if change.state in ("restarting", "lost"):
                    said = f"exit code {change.exit_code}: {change.error}" if change.error else change.state
                    deaths.append((name, start, html.escape(said)))
    workers = {name for bars in spans.values() for name, *_ in bars}
    fig = figure(_TIME, "", barmode="overlay", hovermode="closest", height=160 + 40 * len(workers))
    for state in sorted(spans, key=list(_STATES).index):
        bars = spans[state]
        fig.add_bar(
            orientation="h",
            y=[name for name, *_ in bars],
            base=[start for _, start, *_ in bars],
            x=[seconds for *_, seconds, _ in bars],
            text=[text for *_, text in bars],
            textposition="none",
            name=state,
            marker={"color": _STATES[state], "line": {"width": 0}},
        )
    updates = course.events(Update)
    for good, symbol, color in ((True, "line-ns-open", "#1f77b4"), (False, "x", "#d62728")):
        some = [(t, line) for t, line in updates if (not line.error) == good]
        if some:
            fig.add_scatter(
                x=[t for t, _ in some],
                y=["updates"] * len(some),
                text=[html.escape(u.error) or f"version {u.version}, {u.seconds:.3f} s" for _, u in some],
                mode="markers",
                marker={"symbol": symbol, "size": 10, "color": color},
                name="update" if good else "failed update",
            )
    if deaths:
        fig.add_scatter(
            x=[t for _, t, _ in deaths],
            y=[name for name, *_ in deaths],
            text=[text for *_, text in deaths],
            mode="markers",
            marker={"symbol": "x", "size": 11, "color": "#d62728"},
            name="death",
        )
    fig.update_yaxes(type="category", autorange="reversed")
    about = "What each worker did, its deaths and restarts, and the weight updates."
    return Plot("timeline", "Workers", fig if spans else None, about if spans else "No worker was started.")


def ended(course: Course) -> str:
    """How the run ended, in words."""
    ends = course.lives[-1].of(End)
    if not ends:
        return "it runs, or was killed"
    return "left to the next trainer" if ends[-1].detached else "closed"


# -- the page -------------------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1240px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 0 } section { min-width: 0 } section p { margin: 0 0 .3rem; color: #666 }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(520px, 1fr)); gap: 1.5rem }
.wide { grid-column: 1 / -1 } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px } td, th { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top }
td pre { margin: 0; white-space: pre-wrap; word-break: break-word; max-width: 28rem; max-height: 9rem; overflow-y: auto; font-size: 12px }
"""


def page(title: str, plots: Sequence[Plot], before: str = "", after: str = "") -> str:
    """One HTML file with everything in it, plotly's script included. `before` and `after` the plots: markup."""
    sections = []
    script: bool = True
    for plot in plots:
        body = ""
        if plot.figure is not None:
            body = plot.figure.to_html(
                full_html=False,
                include_plotlyjs=script,
                div_id=f"plot-{plot.name}",
                config={"displaylogo": False, "responsive": True},
            )
            script = False
        wide = ' class="wide"' if plot.name == "timeline" else ""
        sections.append(
            f"<section{wide}><h2>{html.escape(plot.title)}</h2><p>{html.escape(plot.about)}</p>{body}</section>"
        )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><link rel="icon" href="data:,">'
        f'<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>{before}<div class="plots">{"".join(sections)}</div>{after}</body></html>\n'
    )


def html_table(rows: Iterable[Mapping[str, Any]], preformatted: Sequence[str] = ()) -> str:
    """Rows of the same keys as a table; all values are escaped."""
    rows = list(rows)
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = ""
    for row in rows:
        cells = (
            f"<td><pre>{html.escape(str(value))}</pre></td>"
            if name in preformatted
            else f"<td>{html.escape(str(value))}</td>"
            for name, value in row.items()
        )
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
