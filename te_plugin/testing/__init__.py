"""Deliberate damage, for tests that the checks of a run can fail. Never imported by a healthy run."""
