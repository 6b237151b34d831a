"""The boxes of a service as all its parts see them: what a box is made of, what is free on it, and what both sides say.

A *box* is a machine with a home, a dispatcher, a database and a Ray of its own. The *head* is the box with the API and
the queue. A box works on the jobs that the head gives it, and reports what becomes of them.
"""

from windlass.exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
