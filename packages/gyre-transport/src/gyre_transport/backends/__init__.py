"""How bytes of a remote region come here. One module a backend: `shm` (one machine), `tcp` (any two)."""
