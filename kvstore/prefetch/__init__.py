"""How long a request waits for a load, and whether loading beats computing. No I/O, no clock."""
