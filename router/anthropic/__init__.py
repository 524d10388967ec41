"""The Anthropic dialect: Messages requests, event streams, whole replies, errors.

Workers are spoken to in OpenAI's dialect whatever the client speaks, so this
room translates both ways: ``request`` turns a body into a ``Job``, ``stream``
and ``reply`` turn deltas into what the client reads, ``errors`` faults into
error bodies. All of it is pure and synchronous. Rules M1-M8 of the contract.
"""
