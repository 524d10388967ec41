import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.command import fill, find_program, words_in


def filled(*command: str) -> list[str]:
    return fill(command, port=9001, slots=4, model="a b/{port}.gguf")


def test_l6_the_three_words_are_filled_in_once() -> None:
    assert filled("serve", "--port={port}", "{slots}{slots}", "{model}") == [
        "serve",
        "--port=9001",
        "44",
        "a b/{port}.gguf",
    ]


@pytest.mark.parametrize(
    "argument",
    [
        '{"enable_thinking": false}',
        '{"a": {"b": {}}, "c": [{}]}',
        "{}",
        "{ port }",
        "a{3}",
        "{{port}}",
        "{{ messages }}",
        "}{",
        "{",
        "{port",
        "{'port'}",
    ],
)
def test_l6_all_other_braces_stay(argument: str) -> None:
    assert filled(argument) == [argument]


def test_l6_a_word_inside_of_json_is_a_word() -> None:
    assert filled('{"n":{slots},"m":{"p":{port}}}') == ['{"n":4,"m":{"p":9001}}']


@pytest.mark.parametrize("word", ["prot", "PORT", "host", "my-model", "_"])
def test_l6_another_word_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"there are \{port\}, \{slots\}, \{model\}"):
        filled("serve", f"--x={{{word}}}")


@pytest.mark.parametrize("word", ["slots", "model"])
def test_l6_a_word_without_a_value_names_its_setting(word: str) -> None:
    with pytest.raises(ValueError, match=f"needs the setting {word}"):
        fill([f"{{{word}}}"], port=1, slots=None, model=None)


@given(st.text(alphabet='{}" :,ab1_-', max_size=30))
def test_l6_what_holds_no_word_comes_out_as_it_went_in(argument: str) -> None:
    if not words_in(argument):
        assert filled(argument) == [argument]


def test_a_program_is_found_as_exec_would_find_it(tmp_path: Path) -> None:
    program = tmp_path / "serve"
    program.write_text("#!/bin/sh\n")
    here = {"PATH": str(tmp_path)}

    assert "no program serve" in (find_program("serve", environ=here, cwd=None) or "")
    assert "not executable" in (
        find_program("./serve", environ={}, cwd=str(tmp_path)) or ""
    )
    program.chmod(0o755)
    assert find_program("serve", environ=here, cwd=None) is None
    assert find_program("./serve", environ={}, cwd=str(tmp_path)) is None
    assert find_program(str(program), environ={}, cwd=None) is None
    assert find_program("sh", environ={"PATH": os.defpath}, cwd=None) is None
    assert "no program" in (find_program("./other", environ={}, cwd=None) or "")
