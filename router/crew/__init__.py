"""The workers as the fleet sees them: each one's record, and all together."""

from router.crew.crew import Crew
from router.crew.member import DEFAULT_SLOTS, Member

__all__ = ["DEFAULT_SLOTS", "Crew", "Member"]
