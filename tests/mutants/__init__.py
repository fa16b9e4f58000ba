"""Deliberate faults, and the tests that must find them: `make mutants`."""
