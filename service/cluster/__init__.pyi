"""Boxes that work for one service: how they join, what they call, and the head's side of it."""

from windlass.service.cluster.versions import Versions as Versions
