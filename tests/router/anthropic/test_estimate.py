"""Upper bounds of prompt tokens."""

import base64
import json
import struct
from typing import Any

import pytest

from router.anthropic.estimate import (
    IMAGE_TOKENS,
    SMALL_IMAGE_TOKENS,
    tokens_at_most,
    tokens_of_image,
    tokens_of_images,
)
from router.anthropic.request import parse_count
from router.messages import Job


def job(**fields: Any) -> Job:
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    return parse_count(json.dumps(asked).encode(), {"m": "m"}.get)


def url(octets: bytes, media: str = "image/png") -> str:
    return f"data:{media};base64,{base64.b64encode(octets).decode()}"


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height)


def jpeg(width: int, height: int) -> bytes:
    app = b"\xff\xe0" + struct.pack(">H", 16) + bytes(14)
    frame = b"\xff\xc0" + struct.pack(">HBHH", 17, 8, height, width) + bytes(10)
    return b"\xff\xd8" + app + frame


def test_m8_there_are_no_more_tokens_than_bytes() -> None:
    for text in ("word " * 500, "漢字" * 500, "\x00" * 500):
        asked = job(messages=[{"role": "user", "content": text}])

        assert tokens_at_most(asked) >= len(text.encode())


def test_m8_every_part_of_a_prompt_counts() -> None:
    plain = tokens_at_most(job())
    tool = {"name": "f", "input_schema": {"type": "object", "description": "y" * 90}}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "z" * 90}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r" * 90}
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]

    assert tokens_at_most(job(system="s" * 90)) >= plain + 90
    assert tokens_at_most(job(tools=[tool])) >= plain + 90
    assert tokens_at_most(job(messages=history)) >= plain + 180


def test_m8_what_a_template_may_write_beside_the_text_counts() -> None:
    def history(thinking: str, call: str, result: str) -> int:
        blocks = [
            {"type": "thinking", "thinking": thinking, "signature": ""},
            {"type": "tool_use", "id": call, "name": "f", "input": {}},
        ]
        answer = {"type": "tool_result", "tool_use_id": result, "content": "r"}
        turns = [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [answer]},
        ]
        return tokens_at_most(job(messages=turns))

    plain = history("t", "i", "i")
    more = "x" * 90
    assert history("t" + more, "i", "i") == plain + 90
    assert history("t", "i" + more, "i") == plain + 90
    assert history("t", "i", "i" + more) == plain + 90


@pytest.mark.parametrize(
    ("image", "tokens"),
    [
        (url(png(1920, 1080)), SMALL_IMAGE_TOKENS),
        (url(png(4000, 3000)), IMAGE_TOKENS),
        (url(jpeg(800, 600), "image/jpeg"), SMALL_IMAGE_TOKENS),
        (url(jpeg(4000, 3000), "image/jpeg"), IMAGE_TOKENS),
        (url(b"\xff\xd8\xff"), IMAGE_TOKENS),
        (url(b"GIF89a"), IMAGE_TOKENS),
        (url(b""), IMAGE_TOKENS),
        ("data:image/png;base64,!!!!", IMAGE_TOKENS),
        ("http://x/y.png", IMAGE_TOKENS),
    ],
)
def test_m8_an_image_costs_what_the_dearest_model_spends(
    image: str, tokens: int
) -> None:
    assert tokens_of_image(image) == tokens


def test_m8_images_of_tool_results_count_too() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    asked = job(messages=[{"role": "user", "content": [result, image]}])

    assert tokens_of_images(asked) == 2 * IMAGE_TOKENS
    assert tokens_at_most(asked) > 2 * IMAGE_TOKENS
