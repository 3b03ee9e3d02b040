"""Offline tools: trace simulation, planning, prompt diagnosis, load generation, break-even."""
