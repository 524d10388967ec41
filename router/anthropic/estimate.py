"""How many tokens a prompt has at most, where its worker does not say (M8).

Never an under-estimate: an agent that is told too little fills the context
until its requests are refused; told too much, it makes room early.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from router.messages import Job

#: Tokens of one image: the most that common vision models spend on one, and
#: on one of no more than IMAGE_PIXELS (Qwen-VL counts 28 by 28 pixels, others
#: cut it into tiles).
IMAGE_TOKENS: Final = 16_384
SMALL_IMAGE_TOKENS: Final = 7_400
IMAGE_PIXELS: Final = SMALL_IMAGE_TOKENS * 28 * 28 * 3 // 4
#: Tokens that a chat template puts around one message, and around them all.
AROUND_ONE: Final = 16
AROUND_ALL: Final = 512

#: Characters of base64 that are looked at for an image's size.
_HEAD_MAX: Final = 96 * 1024
_encode: Final = msgspec.json.Encoder().encode


def tokens_at_most(job: Job) -> int:
    """Give an upper bound of the prompt tokens of a chat *job*, as it is sent.

    A tokenizer over bytes gives no more tokens than there are bytes.
    """
    total = AROUND_ALL + len(_encode(job.extras.get("tools", [])))
    for message in job.messages:
        total += AROUND_ONE
        total += sum(len(text.encode("utf-8", "replace")) for text in _texts(message))
    return total + tokens_of_images(job)


def tokens_of_images(job: Job) -> int:
    """Give an upper bound of the tokens of a chat *job*'s images alone."""
    return sum(
        tokens_of_image(part["image_url"]["url"])
        for message in job.messages
        for part in _parts(message)
        if part["type"] == "image_url"
    )


def tokens_of_image(url: str) -> int:
    """Give an upper bound of the tokens of the image at *url*, or in it."""
    scheme, _, encoded = url.partition(";base64,")
    if not scheme.startswith("data:") or not encoded:
        return IMAGE_TOKENS
    head = encoded[:_HEAD_MAX]
    try:
        octets = base64.b64decode(head[: len(head) // 4 * 4])
    except (binascii.Error, ValueError):
        return IMAGE_TOKENS
    size = _png(octets) or _jpeg(octets)
    if size is None or size[0] * size[1] > IMAGE_PIXELS:
        return IMAGE_TOKENS
    return SMALL_IMAGE_TOKENS


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, list) else []


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(message["content"], str):
        yield message["content"]
    for part in _parts(message):
        if part["type"] == "text":
            yield part["text"]
    yield message.get("reasoning_content", "")
    for call in message.get("tool_calls", ()):
        yield call["function"]["name"]
        yield call["function"]["arguments"]
        # Some templates write the id too.
        yield call["id"]
    yield message.get("tool_call_id", "")


def _png(octets: bytes) -> tuple[int, int] | None:
    """Read width and height out of a PNG's first chunk."""
    if not octets.startswith(b"\x89PNG\r\n\x1a\n") or octets[12:16] != b"IHDR":
        return None
    return int.from_bytes(octets[16:20]), int.from_bytes(octets[20:24])


def _jpeg(octets: bytes) -> tuple[int, int] | None:
    """Read width and height out of a JPEG's frame header, if it comes early."""
    if not octets.startswith(b"\xff\xd8"):
        return None
    at = 2
    while at + 9 <= len(octets) and octets[at] == 0xFF:
        marker, length = octets[at + 1], int.from_bytes(octets[at + 2 : at + 4])
        # SOF0 to SOF15, but for the tables that have numbers between them.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height = int.from_bytes(octets[at + 5 : at + 7])
            return int.from_bytes(octets[at + 7 : at + 9]), height
        at += 2 + length
    return None
