"""Whose an exception is: one client's, or the whole process's (L1, B126)."""

from router.errors import LocalError


def sort_out(
    raised: BaseException,
) -> tuple[Exception | None, BaseException | None]:
    """Split *raised* into what stays with one client, and what must go on.

    A group is one outcome: with a LocalError in it all of it goes on; else
    its Exceptions are a bug to be told once, and the rest of it, cancellations
    say, goes on without them.
    """
    if isinstance(raised, BaseExceptionGroup):
        if raised.subgroup(LocalError) is not None:
            return None, raised
        return raised.split(Exception)
    if isinstance(raised, LocalError) or not isinstance(raised, Exception):
        return None, raised
    return raised, None
