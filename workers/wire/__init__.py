"""The wire between routers and agents: pure, and without a socket (P1-P7).

``docs/wire.md`` is the specification. `frames` is the codec, `opening` how two
ends get to know each other, `routing` the router's end, `hosting` the agent's.
"""
