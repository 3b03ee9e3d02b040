"""Statistics, logs and traces, and their export. No other behaviour depends on them."""
