"""The configuration tree (`settings`) and the units its values are written in (`units`)."""
