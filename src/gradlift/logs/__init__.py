"""Other people's logs as runs: consoles, tables, event files of trainers without gradlift."""

from .reading import FORMATS, LogReader, read_log, read_run, sizes, whole_file

__all__ = ["FORMATS", "LogReader", "read_log", "read_run", "sizes", "whole_file"]
