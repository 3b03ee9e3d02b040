"""What kvstore counts, logs and traces, and how that is exposed. It decides nothing."""
