"""The allow-list, written out a second time, and the page that tells of it."""

import re
from pathlib import Path
from typing import Final

from router.openai.fields import PASSED, READ

PAGE: Final = (Path(__file__).parents[3] / "docs/openai.md").read_text()
#: One that leaves the code by mistake must not leave here too.
ALLOWED: Final = """
    tools tool_choice parallel_tool_calls

    response_format json_schema grammar structured_outputs guided_json
    guided_regex guided_choice guided_grammar regex ebnf

    logprobs top_logprobs

    presence_penalty frequency_penalty repetition_penalty repeat_penalty
    repeat_last_n logit_bias bad_words top_k min_p typical_p top_n_sigma
    xtc_probability xtc_threshold dry_multiplier dry_base dry_allowed_length
    dry_penalty_last_n dry_sequence_breakers dynatemp_range dynatemp_exponent
    mirostat mirostat_tau mirostat_eta samplers min_tokens ignore_eos
    stop_token_ids include_stop_str_in_output skip_special_tokens

    reasoning reasoning_effort reasoning_format include_reasoning
    separate_reasoning chat_template_kwargs thinking_budget_tokens
    reasoning_budget_tokens reasoning_budget_message thinking_token_budget

    add_generation_prompt continue_final_message cache_prompt mm_processor_kwargs
"""


def column(heading: str, number: int) -> list[list[str]]:
    """Read the names in one column of the table under *heading*, row by row."""
    part = PAGE.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [line for line in part.splitlines() if line.startswith("| ")][1:]
    return [re.findall(r"`([\w.]+)`", row.split("|")[number]) for row in rows]


def test_o1_these_fields_and_no_other_ones_are_passed() -> None:
    assert sorted(ALLOWED.split()) == sorted(PASSED)


def test_o1_the_page_lists_what_is_passed_and_what_is_checked() -> None:
    *checked, dropped = column("## Chat", 1)
    names = [name for row in checked for name in row]
    passed = column("### Passed through, not implemented", 2)

    assert {name.partition(".")[0] for name in names} == READ
    assert sorted(name for row in passed for name in row) == sorted(PASSED)
    assert dropped
    assert not (READ | PASSED) & set(dropped)
