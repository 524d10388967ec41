"""The turns of a Messages request as chat messages of an OpenAI engine (M2).

Neighbours of one role become one message, as the dialect has it. The results
of tools come first in a user's message, whichever of its turns has them, each
as a message of its own, since templates want them right behind the calls; what
can only be shown to a user, images above all, follows (B69).
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from router.anthropic.blocks import (
    Dropped,
    Part,
    block_list,
    joined,
    shown_parts,
    text_of,
    text_part,
    words_of,
)
from router.checks import bad, flag, missing

#: A line that some agents put before their prompt, new in each request: it
#: would make every cached prefix worthless.
_BILLING: Final = "x-anthropic-billing-header:"
#: How the types of results of tools end that their own server ran.
_SERVERS_RESULT: Final = "_tool_result"

_encode: Final = msgspec.json.Encoder().encode


class Conversation:
    """Gathers chat messages, turn by turn."""

    def __init__(self, dropped: Dropped) -> None:
        """Start empty; what is left out goes to *dropped*."""
        self._dropped = dropped
        self._system: list[str] = []
        self._messages: list[dict[str, Any]] = []
        #: Parts of the user's message that is being gathered.
        self._parts: list[Part] = []

    def system(self, content: object, where: str = "system") -> None:
        """Take a system prompt.

        Raises:
            RequestInvalid: it is no string and no list of text blocks.
        """
        for place, block in enumerate(block_list(content, where)):
            for part in shown_parts(block, f"{where}.{place}", self._dropped):
                if part["type"] != "text":
                    raise bad(f"{where}.{place}.type", "must be 'text'")
                if not part["text"].startswith(_BILLING):
                    self._system.append(part["text"])

    def turn(self, message: object, where: str) -> None:
        """Take one message.

        Raises:
            RequestInvalid: it is malformed; *where* and what follows is named.
        """
        if not isinstance(message, dict):
            raise bad(where, "must be an object")
        role = message.get("role")
        if role is None:
            raise missing(f"{where}.role")
        blocks = block_list(message.get("content"), f"{where}.content")
        if role == "user":
            self._user(blocks, f"{where}.content")
        elif role == "assistant":
            self._assistant(blocks, f"{where}.content")
        elif role == "system":
            self._late_system(blocks, f"{where}.content")
        else:
            raise bad(f"{where}.role", "must be user, assistant or system")

    def messages(self) -> tuple[dict[str, Any], ...]:
        """Give all of it; empty: nothing was said."""
        self._end_user()
        if not self._messages or not self._system:
            return tuple(self._messages)
        return (
            {"role": "system", "content": "\n".join(self._system)},
            *self._messages,
        )

    @property
    def is_prefilled(self) -> bool:
        """The last turn is the assistant's own words, to be gone on with."""
        if self._parts or not self._messages:
            return False
        last = self._messages[-1]
        return (
            last["role"] == "assistant"
            and bool(last["content"])
            and "tool_calls" not in last
        )

    # ---- turns ----

    def _user(self, blocks: list[dict[str, Any]], where: str) -> None:
        results: list[dict[str, Any]] = []
        parts: list[Part] = []
        for place, block in enumerate(blocks):
            at = f"{where}.{place}"
            if block["type"] == "tool_result":
                message, images = self._tool_result(block, at)
                results.append(message)
                parts += images
            else:
                parts += shown_parts(block, at, self._dropped)
        # Before what earlier turns of the user say, which still waits.
        self._messages += results
        self._parts += parts

    def _tool_result(
        self, block: Mapping[str, Any], where: str
    ) -> tuple[dict[str, Any], list[Part]]:
        """Give a tool's message, and the images for the user's."""
        call = text_of(block, where, "tool_use_id")
        content = block.get("content")
        parts: list[Part] = []
        if content is not None:
            inner = f"{where}.content"
            for place, one in enumerate(block_list(content, inner)):
                parts += shown_parts(one, f"{inner}.{place}", self._dropped)
        images = [part for part in parts if part["type"] != "text"]
        text = joined(parts)
        if images:
            note = f"[{len(images)} image(s): see the next message]"
            text = f"{text}\n{note}" if text else note
            images.insert(0, text_part(f"[image(s) of the tool result {call}]"))
        if flag(block, "is_error", f"{where}.is_error"):
            text = f"Error: {text}" if text else "Error"
        return {"role": "tool", "tool_call_id": call, "content": text}, images

    def _assistant(self, blocks: list[dict[str, Any]], where: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for place, block in enumerate(blocks):
            kind, at = block["type"], f"{where}.{place}"
            if kind == "text":
                texts.append(text_of(block, at))
            elif kind == "thinking":
                thoughts.append(text_of(block, at, "thinking"))
            elif kind == "tool_use":
                calls.append(_tool_call(block, at))
            else:
                self._parts += self._beside(block, at)
        text = "".join(texts)
        if text or calls:
            self._add_assistant(text, "".join(thoughts), calls)

    def _beside(self, block: Mapping[str, Any], where: str) -> list[Part]:
        """Give what the user is to say of a block that is no word of the assistant's.

        In the assistant's own message it would pass for the model's words, and as
        its last turn be gone on with.
        """
        kind = block["type"]
        if kind == "compaction":
            return shown_parts(block, where, self._dropped)
        self._dropped.note(f"block.assistant.{kind}")
        if kind.endswith(_SERVERS_RESULT):
            # Without its call, whose answer it is can't be told.
            return []
        words = words_of(block)
        return [text_part(words)] if words else []

    def _add_assistant(
        self, text: str, thoughts: str, calls: list[dict[str, Any]]
    ) -> None:
        self._end_user()
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant":
            last = {"role": "assistant", "content": ""}
            self._messages.append(last)
        last["content"] += text
        if thoughts:
            # Its own field: never a word of it in the text (M7, B74).
            last["reasoning_content"] = last.get("reasoning_content", "") + thoughts
        if calls:
            last.setdefault("tool_calls", []).extend(calls)

    def _late_system(self, blocks: list[dict[str, Any]], where: str) -> None:
        """Take a system turn: before all others it is the prompt's; else most
        templates refuse it, and the user's turn carries it."""
        if not self._messages and not self._parts:
            self.system(blocks, where)
            return
        for place, block in enumerate(blocks):
            for part in shown_parts(block, f"{where}.{place}", self._dropped):
                if part["type"] == "text":
                    note = f"<system>\n{part['text']}\n</system>"
                    self._parts.append(text_part(note))

    def _end_user(self) -> None:
        parts, self._parts = self._parts, []
        if not parts:
            return
        # A string where it can be one: some templates know no parts.
        only_text = all(part["type"] == "text" for part in parts)
        content = joined(parts) if only_text else parts
        self._messages.append({"role": "user", "content": content})


def _tool_call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise bad(f"{where}.input", "must be an object")
    return {
        "id": text_of(block, where, "id"),
        "type": "function",
        "function": {
            "name": text_of(block, where, "name"),
            "arguments": _encode(arguments).decode(),
        },
    }
