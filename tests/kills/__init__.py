"""Training runs that are killed at any instant, resumed, and compared with one that never was."""
