"""Policies: pure orderings and verdicts, without I/O and without a clock."""
