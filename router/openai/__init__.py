"""The OpenAI dialect: request checks, streams, whole replies, errors, workers.

OpenAI JSON is a concern of the edges (O8): ``request`` turns a client's body
into a ``Job``, ``upstream`` a job into a worker's body and its answer into
deltas, ``reply`` deltas into what the client reads, ``errors`` faults into
error bodies. All of it is pure and synchronous.
"""
