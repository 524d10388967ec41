"""Hypothesis profiles: ``fast`` for every run, ``deep`` where FENCEPOST_DEEP asks."""

import signal

import hypothesis

from tests.kit.deep import size

# In the background of a script a shell has us ignore SIGINT, and all our children,
# some of which are to end by it, would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Fast runs are the same on every machine; deep ones look for what is new.
hypothesis.settings.register_profile(
    "fast",
    max_examples=50,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "deep",
    max_examples=size(5_000, least=100),
    stateful_step_count=50,
    print_blob=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("deep" if size(1_000_000, least=0) else "fast")
