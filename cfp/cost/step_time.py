"""Step time from a schedule, its computation and the links' rates.

One GPU that plays one of N runs a program's computation alone. What the step takes on
all N follows from three things more: what each collective takes, how much is computed
between its start and its end, and how much the two slow each other down.

The computation alone runs too fast in one way. Collectives that do nothing leave zeros,
and a GPU at its power limit multiplies zeros at a higher clock: on one H200 a product
of [6144, 4096] and [4096, 16384] takes 1.07 ms with numbers in it, and 0.92 ms after an
all-gather that did nothing. So products never take less than at the rate that devices
sustain.
"""

from __future__ import annotations

from dataclasses import dataclass

from cfp.cost.schedule import Schedule, Sent
from cfp.profiling.rates import Rates

_KERNEL_MS = 0.002  # From one kernel to the next, about.
# At least so much of a step's time multiplies, whatever the bytes say.
_LEAST_PRODUCTS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Correction of predictions: one number for each kind of device.

    The values are those of 32 whole steps of two models on 2 H200, found by
    ``python -m cfp_test.bench.one_as_n fit``; steps on 4 H200 took no part.

    Attributes:
        sustained: the rate of products inside a long step, of that of a short probe.
        beside: the speed of a collective and of the computation beside it, of what
            each has alone.
        inside: what a collective takes inside a program, of the curve's time.
        launch_ms: what each collective takes beside that.
    """

    sustained: float = 0.899
    beside: float = 0.683
    inside: float = 0.758
    launch_ms: float = 0.020


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A predicted step, in milliseconds.

    Attributes:
        total_ms: the whole step.
        computation_ms: what computing alone takes.
        exposed_ms: while something is sent and nothing computed.
        hidden_ms: of sending, beside computation.
        slowed_ms: what the computation loses to what is sent beside it.
    """

    total_ms: float
    computation_ms: float
    exposed_ms: float
    hidden_ms: float
    slowed_ms: float


def step_time(
    schedule: Schedule,
    rates: Rates,
    *,
    computation_ms: float | None = None,
    constants: Constants | None = None,
) -> StepTime:
    """Predicts what a step takes on all devices of a mesh.

    Args:
        schedule: of the compiled program.
        rates: of the mesh.
        computation_ms: what the program takes on one device that plays one of the
            mesh's, or None to take it from the rates.
        constants: of the device kind.
    """
    constants = constants or Constants()
    speeds = _computation(schedule, rates, computation_ms, constants)
    left = [_price(one, rates, constants) for one in schedule.sent]
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for number, one in enumerate(schedule.sent):
        starts.setdefault(one.start, []).append(number)
        ends.setdefault(one.done, []).append(number)
    running: list[int] = []  # One after another, in the order of their starts.
    exposed = hidden = slowed = 0.0
    for place in range(len(speeds) + 1):
        running += starts.get(place, [])
        for number in ends.get(place, []):
            while number in running:
                exposed += left[running.pop(0)]
        work = speeds[place] if place < len(speeds) else 0.0
        while running and work > 0:
            # Both at the same part of their speed, so each does as much as the other.
            both = min(work, left[running[0]])
            work -= both
            hidden += both
            slowed += both / constants.beside - both
            left[running[0]] -= both
            if left[running[0]] <= 0:
                running.pop(0)
    exposed += sum(left[number] for number in running)
    computation = sum(speeds)
    return StepTime(
        total_ms=computation + slowed + exposed,
        computation_ms=computation,
        exposed_ms=exposed,
        hidden_ms=hidden,
        slowed_ms=slowed,
    )


def _computation(
    schedule: Schedule, rates: Rates, measured_ms: float | None, constants: Constants
) -> list[float]:
    """Milliseconds of each part of the computation, without anything beside it."""
    rate = rates.matmul_flops_per_ms["bfloat16"] * constants.sustained
    products = [one.flops / rate for one in schedule.computed]
    others = [
        rates.memory_ms(one.moved_bytes) + _KERNEL_MS * one.kernels
        for one in schedule.computed
    ]
    least, rest = sum(products), sum(others)
    if measured_ms is not None and least > 0 and rest > 0:
        part = min(rest, (1 - _LEAST_PRODUCTS) * measured_ms)
        slower = max(measured_ms - part, least) / least
        products = [ms * slower for ms in products]
        others = [ms * part / rest for ms in others]
    return [a + b for a, b in zip(products, others, strict=True)]


def _price(one: Sent, rates: Rates, constants: Constants) -> float:
    axes = _axes(one, rates)
    # Curves know whole tensors of a group; of an all-to-all a device has one piece.
    pieces = one.group_size if one.kind not in _WHOLE else 1
    size = one.bytes * pieces
    curve = rates.collective_ms(one.kind, axes, size)
    if one.kind == "all-reduce":
        # As any program could say it, should the library's own way be slower.
        halves = ("reduce-scatter", "all-gather")
        curve = min(curve, sum(rates.collective_ms(k, axes, size) for k in halves))
    return curve * constants.inside + constants.launch_ms


_WHOLE = frozenset(
    ("all-reduce", "all-gather", "reduce-scatter", "collective-broadcast")
)


def _axes(one: Sent, rates: Rates) -> tuple[str, ...]:
    """Axes whose sizes multiply to the group's, the last ones that do."""
    found: list[tuple[tuple[str, ...], int]] = [((), 1)]
    for name, size in reversed(rates.mesh):
        found += [((name, *names), size * count) for names, count in found]
    for names, count in found:
        if count == one.group_size:
            return names
    return tuple(name for name, _ in rates.mesh)
