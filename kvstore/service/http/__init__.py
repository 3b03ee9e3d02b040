"""The HTTP side of the sidecar: health, metrics, statistics, frames, administration, dashboard."""
