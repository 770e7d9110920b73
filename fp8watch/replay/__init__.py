"""Runs recorded runs through the same detectors and policies: other tools' logs and our own stores."""
