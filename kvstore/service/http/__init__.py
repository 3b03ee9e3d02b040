"""The sidecar's HTTP server: health, metrics, statistics, frames, administration, dashboard."""
