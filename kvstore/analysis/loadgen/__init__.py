"""What `kvstore bench serve` is made of: workloads, one endpoint, the run, its summary."""
