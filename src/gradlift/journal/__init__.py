"""The run's record: its lines, their writer and reader, and the recorder that makes them."""

from .reader import JOURNAL, SCHEMA, read_journal
from .recorder import Channel, Recorder, channel, current, set_current
from .records import Call, Calls, Event, Probe, Run, Sample, Step
from .writer import Journal, JournalLike, Sink, opened

__all__ = [
    "JOURNAL",
    "SCHEMA",
    "Call",
    "Calls",
    "Channel",
    "Event",
    "Journal",
    "JournalLike",
    "Probe",
    "Recorder",
    "Run",
    "Sample",
    "Sink",
    "Step",
    "channel",
    "current",
    "opened",
    "read_journal",
    "set_current",
]
