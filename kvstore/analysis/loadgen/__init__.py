"""Parts of `kvstore bench serve`: workloads, one endpoint, the run, its summary."""
