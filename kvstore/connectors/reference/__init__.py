"""The connector of the reference engine."""
