"""A small chart kit: inline SVG whose colours come from the page, so that one figure serves light and dark.

    plot = Plot(x=Axis.linear(0, 60, "time, s"), y=Axis.log(0.01, 10, "TTFT"))
    plot.line(points, "s1", "p50")
    svg = plot.render("Time to first token over the run")

No script: hovering shows each mark's `<title>`. Series classes are s1 .. s6; `bad` is for failures, `mark` for bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 14, 42
MAX_POINTS = 1500  # of one line; more cannot be seen and only make the file heavy

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """One scale: a range, ticks with their labels, and a name with its unit."""

    low: float
    high: float
    label: str
    ticks: tuple[tuple[float, str], ...]
    logarithmic: bool = False

    @staticmethod
    def linear(
        low: float, high: float, label: str, text: Callable[[float], str] | None = None, *, tight: bool = False
    ) -> Axis:
        """Linear, widened to the next tick, or `tight`: ending exactly where the data end."""
        if not high - low > 1e-12 * max(1.0, abs(low)):  # a single value, or a difference that is only rounding
            high = low + 1.0
        step = round_step((high - low) / 7.0)
        top = high if tight else math.ceil(high / step - 1e-9) * step
        values = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(top / step + 1e-9) + 1)]
        return Axis(low, top, label, tuple((value, (text or number)(value)) for value in values))

    @staticmethod
    def log(low: float, high: float, label: str, text: Callable[[float], str] | None = None) -> Axis:
        """Logarithmic over positive values; ticks at 1, 2, 5 where there is room, else at powers of ten."""
        low, high = max(low, 1e-9), max(high, 2e-9)
        if high < 2.0 * low:
            low, high = low / 1.5, high * 1.5
        decades = math.log10(high / low)
        factors = (1.0, 2.0, 5.0) if decades <= 2.5 else (1.0,)
        ticks = [
            factor * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for factor in factors
        ]
        inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        return Axis(low, high, label, tuple((tick, (text or number)(tick)) for tick in inside), logarithmic=True)

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end; clamped, so that nothing is drawn outside the frame."""
        if self.logarithmic:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)


def round_step(raw: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    if raw <= 0.0 or not math.isfinite(raw):
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * (1.0 - 1e-9))


def number(value: float) -> str:
    """A tick without needless digits."""
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k" if abs(value) < 1e6 else f"{value / 1e6:g}M"
    return f"{round(value, 10) + 0.0:g}"  # + 0.0: no minus sign before a zero


def seconds(value: float) -> str:
    """A duration as a tick."""
    if value == 0.0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value * 1e6:g} µs"
    return f"{round(value * 1e3, 9):g} ms" if abs(value) < 1.0 else f"{round(value, 9):g} s"


def share(value: float) -> str:
    return f"{round(100 * value, 9):g} %"


@dataclass(slots=True)
class Plot:
    """One figure. Marks are drawn in the order of the calls."""

    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    _marks: list[str] = field(default_factory=list)
    _labels: list[Point] = field(default_factory=list)
    _verticals: int = 0
    _legend: list[tuple[str, str, str]] = field(default_factory=list)

    def _at(self, point: Point) -> tuple[float, float]:
        x = self.left + self.x.place(point[0]) * (self.width - self.left - RIGHT)
        y = self.height - BOTTOM - self.y.place(point[1]) * (self.height - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    def _path(self, points: Sequence[Point], stepped: bool) -> str:
        parts: list[str] = []
        previous = 0.0
        for i, point in enumerate(thin(points)):
            x, y = self._at(point)
            if i and stepped:
                parts.append(f"L{x} {previous}")
            parts.append(f"{'L' if i else 'M'}{x} {y}")
            previous = y
        return "".join(parts)

    def line(self, points: Sequence[Point], style: str, name: str = "", *, stepped: bool = False) -> None:
        """A line through points in order of x; `style` is a series class and modifiers ("s1 dash")."""
        if points:
            self._marks.append(f'<path class="line {style}" d="{self._path(points, stepped)}"/>')
            if name:
                self._legend.append(("line", style, name))

    def area(self, points: Sequence[Point], style: str, name: str = "") -> None:
        """The surface between a stepped line and the x axis."""
        if len(points) > 1:
            floor = self._at((points[0][0], self.y.low))[1]
            start, end = self._at(points[0])[0], self._at(points[-1])[0]
            d = f"{self._path(points, True)}L{end} {floor}L{start} {floor}Z"
            self._marks.append(f'<path class="area {style}" d="{d}"/>')
            if name:
                self._legend.append(("area", style, name))

    def band(self, low: Sequence[Point], high: Sequence[Point], style: str) -> None:
        """The surface between two lines over the same x."""
        if len(low) > 1:
            back = "".join(f"L{x} {y}" for x, y in (self._at(point) for point in reversed(low)))
            self._marks.append(f'<path class="band {style}" d="{self._path(high, False)}{back}Z"/>')

    def points(
        self, points: Sequence[Point], style: str, name: str = "", *, radius: float = 2.5, titles: Sequence[str] = ()
    ) -> None:
        """Dots, each with an optional title."""
        for i, point in enumerate(points):
            x, y = self._at(point)
            title = f"<title>{escape(titles[i])}</title>" if titles else ""
            self._marks.append(f'<circle class="dot {style}" cx="{x}" cy="{y}" r="{radius}">{title}</circle>')
        if name and points:
            self._legend.append(("dot", style, name))

    def ticks_at_top(self, xs: Sequence[float], style: str, name: str) -> None:
        """Short strokes below the upper edge: what has no place on the y axis, such as failures."""
        for x in xs:
            left = self._at((x, self.y.low))[0]
            self._marks.append(f'<path class="line {style}" d="M{left} {TOP}v8"/>')
        if xs:
            self._legend.append(("line", style, name))

    def span(self, start: float, end: float, name: str) -> None:
        """A shaded stretch of the x axis."""
        left, right = self._at((start, self.y.low))[0], self._at((end, self.y.low))[0]
        self._marks.insert(
            0,
            f'<rect class="span" x="{left}" y="{TOP}" width="{round(right - left, 1)}" '
            f'height="{self.height - TOP - BOTTOM}"/>',
        )
        self._legend.append(("span", "", name))

    def vertical(self, x: float, text: str, style: str = "mark") -> None:
        """A bound on the x axis, labelled at its top."""
        if not self.x.low <= x <= self.x.high:
            return
        left = self._at((x, self.y.low))[0]
        right_half = left > self.width * 0.72
        anchor, shift = ("end", -4) if right_half else ("start", 4)
        # Half-way up, where curves of shares leave room; each further label a line lower.
        row = self.height // 2 - 20 + 14 * self._verticals
        self._verticals += bool(text)
        self._marks.append(f'<path class="line {style}" d="M{left} {TOP}V{self.height - BOTTOM}"/>')
        self._marks.append(
            f'<text class="note {style}" x="{left + shift}" y="{row}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def horizontal(self, y: float, text: str, style: str = "mark") -> None:
        """A bound on the y axis, labelled at its right end."""
        if not self.y.low <= y <= self.y.high:
            return
        top = self._at((self.x.low, y))[1]
        right = self.width - RIGHT
        self._marks.append(f'<path class="line {style}" d="M{self.left} {top}H{right}"/>')
        self._marks.append(
            f'<text class="note {style}" x="{right - 4}" y="{top - 4}" text-anchor="end">{escape(text)}</text>'
        )

    def text(self, point: Point, text: str, *, anchor: str = "start", dx: float = 6, dy: float = -6) -> None:
        """A label beside a point; left out where it would cover an earlier one."""
        x, y = self._at(point)
        if any(abs(x - a) < 7.0 * len(text) + 4 and abs(y - b) < 12 for a, b in self._labels):
            return
        self._labels.append((x, y))
        self._marks.append(
            f'<text class="note" x="{round(x + dx, 1)}" y="{round(y + dy, 1)}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def render(self, title: str) -> str:
        """The figure as an `<svg>`; the title is for screen readers, the page has its own caption."""
        legend, rows = self._render_legend()
        return (
            f'<svg viewBox="0 0 {self.width} {self.height + 18 * rows}" role="img" aria-label="{escape(title)}">'
            f"{self._frame()}{''.join(self._marks)}{legend}</svg>"
        )

    def _frame(self) -> str:
        parts: list[str] = []
        bottom, right = self.height - BOTTOM, self.width - RIGHT
        for value, text in self.y.ticks:
            y = self._at((self.x.low, value))[1]
            parts.append(f'<path class="grid" d="M{self.left} {y}H{right}"/>')
            parts.append(
                f'<text class="tick" x="{self.left - 6}" y="{y + 3.5}" text-anchor="end">{escape(text)}</text>'
            )
        for value, text in self.x.ticks:
            x = self._at((value, self.y.low))[0]
            parts.append(f'<path class="grid" d="M{x} {TOP}V{bottom}"/>')
            anchor = "end" if x > right - 12 and len(text) > 3 else "middle"
            at = min(x, right + 6) if anchor == "end" else x
            parts.append(f'<text class="tick" x="{at}" y="{bottom + 15}" text-anchor="{anchor}">{escape(text)}</text>')
        parts.append(f'<path class="axis" d="M{self.left} {TOP}V{bottom}H{right}"/>')
        middle = (self.left + right) / 2
        parts.append(
            f'<text class="label" x="{middle}" y="{self.height - 8}" text-anchor="middle">{escape(self.x.label)}</text>'
        )
        if self.y.label:
            across = (TOP + bottom) / 2
            parts.append(
                f'<text class="label" transform="translate(12 {across}) rotate(-90)" text-anchor="middle">'
                f"{escape(self.y.label)}</text>"
            )
        return "".join(parts)

    def _render_legend(self) -> tuple[str, int]:
        """The legend below the frame, and its rows; the width of text is estimated, as SVG cannot measure it."""
        parts: list[str] = []
        x, row = float(self.left), 0
        for kind, style, name in self._legend:
            width = 21 + 6.1 * len(name)
            if x > self.left and x + width > self.width:
                x, row = float(self.left), row + 1
            y = self.height + 8 + 18 * row
            if kind == "line":
                parts.append(f'<path class="line {style}" d="M{x:.1f} {y}h16"/>')
            elif kind == "dot":
                parts.append(f'<circle class="dot {style}" cx="{x + 8:.1f}" cy="{y}" r="3.5"/>')
            else:
                parts.append(f'<rect class="{kind} {style}" x="{x:.1f}" y="{y - 5}" width="16" height="10"/>')
            parts.append(f'<text class="legend" x="{x + 21:.1f}" y="{y + 4}">{escape(name)}</text>')
            x += width + 14
        return "".join(parts), row + 1 if parts else 0


def thin(points: Sequence[Point]) -> Sequence[Point]:
    """At most about MAX_POINTS of a line, evenly by order; the ends stay."""
    if len(points) <= MAX_POINTS:
        return points
    stride = math.ceil(len(points) / MAX_POINTS)
    kept = list(points[::stride])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def ecdf(values: Sequence[float], total: int | None = None) -> list[Point]:
    """(value, share of `total` at or below it); with a larger total the curve ends below 1."""
    ordered = sorted(values)
    count = total or len(ordered)
    return [(value, (i + 1) / count) for i, value in enumerate(ordered)]


def near_axis(values: Sequence[float], label: str) -> Axis:
    """An axis of durations around the values only, not from 0: for trade-offs, where the shape matters."""
    low, high = min(values), max(values)
    if high > 20.0 * low:
        return Axis.log(low * 0.9, high * 1.1, label, seconds)
    pad = max(0.08 * (high - low), 0.02 * high)
    step = round_step((high - low + 2 * pad) / 7.0)
    return Axis.linear(max(0.0, math.floor((low - pad) / step) * step), high + pad, label, seconds)


def time_axis(values: Sequence[float], label: str, *, logarithmic: bool | None = None) -> Axis:
    """An axis of durations; logarithmic when the values span more than a factor of twenty."""
    finite = [value for value in values if math.isfinite(value) and value > 0.0]
    if not finite:
        return Axis.linear(0.0, 1.0, label, seconds)
    low, high = min(finite), max(finite)
    if logarithmic if logarithmic is not None else high > 20.0 * low:
        return Axis.log(low * 0.9, high * 1.1, label, seconds)
    return Axis.linear(0.0, high, label, seconds)
