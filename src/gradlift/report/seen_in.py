"""In which chart one sees a finding."""

from __future__ import annotations

from collections.abc import Container

from ..analysis.diagnosis import Finding

_CHARTS = {
    "calls": "update-missing update-twice clip-scaled step-beside-scaler step-twice "
    "zero-grad-missing zero-grad-misplaced loss-not-scaled penalty-scaled gan-two-updates "
    "autocast-no-scaler accumulation-not-divided",
    "loss": "diverging spike bad-data masked-rows labels-masked zero-probability bad-operation "
    "half-loss forward-nan poisoned-buffer one-sample-norm crash custom-backward weights-nonfinite",
    "norm": "vanishing clip-too-tight",
    "headroom": "conservative",
    "forward": "forward-overflow dead-relu exploding",
    "histogram": "underflow",
    "heat": "dead-layer detached-layer zero-init",
    "updates": "updates-lost eps-swallows eps-zero decay-wins fp16-parameters weight-range "
    "head-replaced parameters-left-out parameters-shared",
}
_BY_KIND = {kind: chart for chart, kinds in _CHARTS.items() for kind in kinds.split()}
"""Every other kind is seen in the scale."""


def seen_in(finding: Finding, charts: Container[str]) -> str:
    """One of the charts that a page has; "" if it has none of those.

    >>> seen_in(Finding("broken", "", "", kind="spike"), {"scale", "loss"})
    'loss'
    >>> seen_in(Finding("broken", "", "", kind="dead-relu"), {"scale", "loss"})
    'scale'
    """
    for chart in (_BY_KIND.get(finding.kind, "scale"), "scale", "loss"):
        if chart in charts:
            return chart
    return ""


def known_kinds() -> set[str]:
    """The kinds that have a chart of their own."""
    return set(_BY_KIND)
