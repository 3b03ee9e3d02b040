"""Benchmarks that ship with the package: `kvstore bench NAME`."""
