"""The workers as the fleet sees them: each one's record, and all together."""

from router.crew.crew import REST_MAX_S, Crew
from router.crew.member import DEFAULT_SLOTS, Member

__all__ = ["DEFAULT_SLOTS", "REST_MAX_S", "Crew", "Member"]
