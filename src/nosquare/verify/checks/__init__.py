"""The checks themselves, a file a subject; registry.py finds them here."""
