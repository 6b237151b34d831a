"""Answers questions about plans: in processes of their own, and for a job or a machine with one thing changed."""

from windlass.planner.answers.what_if import with_what_if as with_what_if
