"""`apex.parallel.LARC`: there to be imported, and refused when it is used."""

from __future__ import annotations

from typing import Any

from ...errors import SettingsError


class LARC:
    """Layer-wise rates.

    >>> LARC(None)
    Traceback (most recent call last):
        ...
    gradlift.errors.SettingsError: apex's LARC is not here: use timm.optim.Lars from the package \
timm, or give the optimizer itself to amp.initialize
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise SettingsError(
            "apex's LARC is not here: use timm.optim.Lars from the package timm, or give the "
            "optimizer itself to amp.initialize"
        )
