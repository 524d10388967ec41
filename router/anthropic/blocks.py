"""Content blocks as parts of an OpenAI message (M2).

What a model behind an OpenAI endpoint can be shown is shown; what it can't be
is replaced by a note or dropped, and counted, so that a conversation that
holds it goes on (B72). A block that is malformed is refused with its path.
"""

from collections.abc import Mapping
from typing import Any

from router.checks import bad, ignore, missing

#: One part of an OpenAI message.
Part = dict[str, Any]


class Dropped:
    """Names of what was dropped or replaced, for the counter (O1)."""

    def __init__(self) -> None:
        """Start empty."""
        self.names: list[str] = []

    def note(self, name: str) -> None:
        """Count one, by the kind of thing it was."""
        ignore(name, self.names)


def text_part(text: str) -> Part:
    """Give a part of text."""
    return {"type": "text", "text": text}


def block_list(content: object, where: str) -> list[dict[str, Any]]:
    """Give the blocks of *content*; a string is one block of text.

    Raises:
        RequestInvalid: it is neither; *where* is named.
    """
    if isinstance(content, str):
        return [text_part(content)]
    if content is None:
        raise missing(where)
    if not isinstance(content, list):
        raise bad(where, "must be a string or an array of blocks")
    for place, block in enumerate(content):
        if not isinstance(block, dict):
            raise bad(f"{where}.{place}", "must be an object")
        if not isinstance(block.get("type"), str):
            raise bad(f"{where}.{place}.type", "must be a string")
    return content


def text_of(block: Mapping[str, Any], where: str, field: str = "text") -> str:
    """Give a string field that a block must have.

    Raises:
        RequestInvalid: it has none.
    """
    value = block.get(field)
    if value is None:
        raise missing(f"{where}.{field}")
    if not isinstance(value, str):
        raise bad(f"{where}.{field}", "must be a string")
    return value


def shown_parts(block: Mapping[str, Any], where: str, dropped: Dropped) -> list[Part]:
    """Give what a model is shown of one block that a user or a tool has given.

    Empty text gives nothing: templates and engines refuse it (B71).

    Raises:
        RequestInvalid: a block of a known type is malformed.
    """
    kind = block["type"]
    if kind == "text":
        text = text_of(block, where)
        return [text_part(text)] if text else []
    if kind == "image":
        return [_image(block, where, dropped)]
    if kind == "document":
        return _document(block, where, dropped)
    if kind == "compaction":
        return _compaction(block, where)
    dropped.note(f"block.{kind}")
    return [text_part(words_of(block) or f"[{kind} left out]")]


def joined(parts: list[Part]) -> str:
    """Give the text of *parts* as one string; other parts are left out."""
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def _image(block: Mapping[str, Any], where: str, dropped: Dropped) -> Part:
    source = _source(block, where)
    where = f"{where}.source"
    kind = source["type"]
    if kind == "base64":
        media = text_of(source, where, "media_type")
        octets = text_of(source, where, "data")
        return _image_part(f"data:{media};base64,{octets}")
    if kind == "url":
        return _image_part(text_of(source, where, "url"))
    dropped.note(f"block.image.{kind}")
    return text_part("[image left out: it is not in the request]")


def _image_part(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def _source(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    source = block.get("source")
    if source is None:
        raise missing(f"{where}.source")
    if not isinstance(source, dict) or not isinstance(source.get("type"), str):
        raise bad(f"{where}.source", "must be an object with a type")
    return source


def _document(block: Mapping[str, Any], where: str, dropped: Dropped) -> list[Part]:
    """Show a document's text; one that would have to be opened gets a note."""
    source = _source(block, where)
    heads = [block.get("title"), block.get("context")]
    parts = [text_part(head) for head in heads if isinstance(head, str) and head]
    if source["type"] == "text":
        text = text_of(source, f"{where}.source", "data")
        return [*parts, text_part(text)] if text else parts
    if source["type"] == "content":
        inner = f"{where}.source.content"
        for place, one in enumerate(block_list(source.get("content"), inner)):
            parts += shown_parts(one, f"{inner}.{place}", dropped)
        return parts
    dropped.note(f"block.document.{source['type']}")
    media = source.get("media_type")
    what = f" ({media[:40]})" if isinstance(media, str) else ""
    return [*parts, text_part(f"[document{what} left out: it can't be read here]")]


def _compaction(block: Mapping[str, Any], where: str) -> list[Part]:
    """Show the summary that stands for all that was said before it."""
    if block.get("content") is None:
        # None could be made.
        return []
    text = text_of(block, where, "content")
    return [text_part(text)] if text else []


def words_of(block: Mapping[str, Any]) -> str:
    """Find what a block of an unknown type says in words, if anything."""
    found = [
        value
        for name in ("title", "source", "text", "tool_name")
        if isinstance(value := block.get(name), str) and value
    ]
    content = block.get("content")
    if isinstance(content, str):
        found.append(content)
    elif isinstance(content, list):
        found += [words_of(one) for one in content if isinstance(one, dict)]
    return "\n".join(filter(None, found))
