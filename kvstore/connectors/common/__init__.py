"""Modules that several connectors share. Connectors do not import one another."""
