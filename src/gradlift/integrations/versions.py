"""Which versions of a trainer an integration was written for."""

from __future__ import annotations

import re
from importlib import metadata

from ..errors import GradliftError


def require(package: str, lowest: str, below: str) -> None:
    """One clear error if `package` is not installed, or in a version that is not supported.

    >>> require("pytest", "99", "100")  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    gradlift.errors.GradliftError: found pytest 9.2.0, but ... supports 99 up to (not including) 100
    """
    wanted = f"pip install '{package}>={lowest},<{below}'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise GradliftError(f"gradlift.integrations.{package} needs {package}: {wanted}") from None
    if not _numbers(lowest) <= _numbers(found) < _numbers(below):
        raise GradliftError(
            f"found {package} {found}, but gradlift.integrations.{package} supports {lowest} up to "
            f"(not including) {below}: {wanted}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])
