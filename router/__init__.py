"""Fencepost: route LLM requests to GPU workers, every token once, in order.

To embed it: ``router.engine.open_router``, with the nouns of ``router.messages``
and ``router.settings``, and ``router.errors.RequestFailed``.
"""
