"""Proofs of the rules, by z3: `make prove`."""
