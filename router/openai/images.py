"""Messages for a worker that sees no images."""

from collections.abc import Sequence
from typing import Any, Final

#: Stands where an image was.
NOTE: Final = {"type": "text", "text": "[image left out: this model sees none]"}


def without_images(messages: Sequence[Any]) -> list[Any]:
    """Give *messages* with a note in the place of each image; they stay as they are.

    A message of which only text is left gets it as one string: templates of
    models that see no images often know no parts.
    """
    return [_without(message) for message in messages]


def _without(message: Any) -> Any:
    content = message.get("content")
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return message
    parts = [NOTE if _is_image(part) else part for part in content]
    if all(part.get("type") == "text" for part in parts):
        return message | {"content": "\n".join(part["text"] for part in parts)}
    return message | {"content": parts}


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"
