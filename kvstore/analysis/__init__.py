"""Tools that advise: simulation of traces, planning, diagnosis of prompts, load, break-even."""
