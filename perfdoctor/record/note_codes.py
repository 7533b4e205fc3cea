"""Codes of notes that one part of the package writes and another looks for."""

from __future__ import annotations

WITHOUT_CUDA = "no-gpu"  # the loop of a session uses no CUDA
HAS = "has-"  # begins the code of a note on what the loop has already; the name of a treatment follows
