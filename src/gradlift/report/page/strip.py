"""The order of calls in one window, as a row of boxes from left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...analysis import words
from ...analysis.diagnosis import Finding
from ...analysis.findings.calls import orders
from ...analysis.source import Source, line_at, source_of
from ...journal import Call, Calls, Run
from .markup import breakable, escape, link, prose, section

MOST_ORDERS = 12
MOST_CALLS = 40
NEAR = 12  # calls of a row in the answer

_PHASES = {
    "forward": ("autocast", "train"),
    "scale": ("scale", "get_scale"),
    "backward": ("backward", "autograd.grad"),
    "gradients": ("unscale_", "clip_grad_norm_", "clip_grad_value_"),
    "step": ("scaler.step", "optimizer.step", "step", "update", "scheduler.step"),
    "between": ("zero_grad", "model.zero_grad"),
}
_PHASE_OF = {name: phase for phase, names in _PHASES.items() for name in names}


def frequent(run: Run, found: Sequence[Finding], data: Mapping[str, Any]) -> str:
    """The most frequent order that has the first finding's line, as one row of a few calls."""
    known = _by_frequency(run)
    place = found[0].place if found else ""
    having = [order for order in known if any(call.place == place for call in order.order)]
    if not known:
        return ""
    shown = _around((having or known)[0], place)
    return _row(shown, source_of(run), _blamed(found, data), True)


def _around(order: Calls, place: str) -> Calls:
    """Of a long order the calls around the first one that is meant."""
    at = next((i for i, call in enumerate(order.order) if call.place == place), 0)
    first = max(0, min(at - NEAR // 2, len(order.order) - NEAR))
    return order._replace(order=order.order[first : first + NEAR])


def _by_frequency(run: Run) -> list[Calls]:
    found = [calls for calls in orders(run) if calls.order]
    return sorted(found, key=lambda calls: (-calls.times, calls.step))


def _blamed(found: Sequence[Finding], data: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Position and identity of the first finding about a line, by line."""
    return {
        finding.place: (position, data["findings"][position]["id"])
        for position, finding in reversed(list(enumerate(found)))
        if finding.place
    }


def strip(run: Run, found: Sequence[Finding], data: Mapping[str, Any]) -> str:
    """The most frequent order, with the others folded; empty if none was recorded."""
    known = _by_frequency(run)
    if not known:
        return ""
    windows = sum(order.times for order in known)
    source = source_of(run)
    blamed = _blamed(found, data)
    first = known[0]
    essence = " -> ".join(dict.fromkeys(call.name for call in first.order))
    share = f"This order was seen in {first.times:,} of {words.count(windows, 'window')}."
    inside = f'<p class="note">{share}</p>\n{_row(first, source, blamed, True)}'
    others = known[1 : 1 + MOST_ORDERS]
    if others:
        rows = "\n".join(
            f'<p class="note">{words.count(order.times, "window")}, first at step '
            f"{link(f'{order.step:,}', step=order.step)}</p>\n"
            f"{_row(order, source, blamed, False)}"
            for order in others
        )
        left = len(known) - 1 - len(others)
        more = f'<p class="note">{left:,} more are in the journal.</p>' if left else ""
        heading = words.count(len(known) - 1, "other order")
        inside += f"\n<details><summary>{heading}</summary>\n{rows}\n{more}</details>"
    return section(
        "Order of calls",
        essence if len(essence) < 90 else f"{len(first.order)} calls in a window",
        inside,
        name="calls",
        lead="What the script calls in one window, from left to right, with its own lines. "
        "A box with a number at its corner is the subject of that finding.",
        folded=False,
    )


def _row(order: Calls, source: Source, blamed: Mapping[str, tuple[int, str]], marked: bool) -> str:
    boxes = [_box(call, source, blamed) for call in order.order[:MOST_CALLS]]
    left = len(order.order) - MOST_CALLS
    if left > 0:
        boxes.append(f'<li class="call">and {left} more</li>')
    label = "the most frequent order of calls" if marked else "another order of calls"
    return f'<ol class="strip" aria-label="{label}">\n{chr(10).join(boxes)}\n</ol>'


def _box(call: Call, source: Source, blamed: Mapping[str, tuple[int, str]]) -> str:
    times = f' <span class="times">x {call.times:,}</span>' if call.times > 1 else ""
    about = ", ".join(part for part in (call.who, call.fact) if part)
    facts = f'<span class="fact">{prose(about)}</span>' if about else ""
    code = line_at(source, call.place)
    hint = f' title="{escape(code.strip())}"' if code else ""
    place = f'<span class="place"{hint}>{breakable(call.place)}</span>' if call.place else ""
    kind, flag = _PHASE_OF.get(call.name, "other"), ""
    if call.place in blamed:
        position, identity = blamed[call.place]
        kind += " blamed"
        inside = f'{position + 1}<span class="unseen">: to the finding</span>'
        flag = f'<span class="flag">{link(inside, finding=identity)}</span>'
    return f'<li class="call {kind}"><b>{breakable(call.name)}</b>{times}{flag}{facts}{place}</li>'
