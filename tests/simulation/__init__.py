"""Whole services in one process, on a virtual clock and a simulated network. A seed decides everything that happens.

`python -m tests.simulation` runs episodes; `episode.py` says what one is and what must hold after it. Code of the
product runs unchanged: routers' requests, sessions and schedulers of both tiers, the handover and its I/O layers,
registry, prefix index and Redis scripts. Replaced are the event loop, the network, the model and the clock.
Source of the idea: the deterministic simulations of FoundationDB and TigerBeetle.
"""
