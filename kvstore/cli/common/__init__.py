"""Code that several commands share. No commands."""
