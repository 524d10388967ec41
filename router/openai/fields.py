"""Whose each field of a chat request is (O1).

* ``READ``: checked by ``router.openai.request`` and written anew for the worker.
* ``PASSED``: the engine's business; carried opaquely, both ways.
* ``OWNED``: the router's alone, or unsafe to take from a client.

A client's field that is in neither of the first two is dropped and counted.
"""

from typing import Final

#: What the router checks and understands. None of it reaches a worker as sent.
READ: Final = frozenset(
    {
        "model",
        "messages",
        "max_completion_tokens",
        "max_tokens",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "n",
    }
)

#: Tools. Their calls come back as deltas, so nothing of them is lost here.
_TOOLS: Final = {"tools", "tool_choice", "parallel_tool_calls"}

#: Constrained output: OpenAI's name, then llama-server, vLLM, SGLang. It changes
#: which text is chosen, never the shape of the stream.
_FORMAT: Final = {
    "response_format",
    "json_schema",
    "grammar",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "regex",
    "ebnf",
}

#: Log probabilities: they come back in ``Delta.logprobs``.
_LOGPROBS: Final = {"logprobs", "top_logprobs"}

#: Samplers of the engines. One engine ignores another's names.
_SAMPLING: Final = {
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "repeat_penalty",
    "repeat_last_n",
    "logit_bias",
    "top_k",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_range",
    "dynatemp_exponent",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "samplers",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "bad_words",
}

#: Reasoning, and the chat template that turns it on: by engine and age.
_REASONING: Final = {
    "reasoning",
    "reasoning_effort",
    "reasoning_format",
    "include_reasoning",
    "separate_reasoning",
    "chat_template_kwargs",
    "thinking_budget_tokens",
    "reasoning_budget_tokens",
    "reasoning_budget_message",
    "thinking_token_budget",
}

#: How the last assistant message is continued (a prefill), and whether the
#: engine may use its prompt cache: the client's choice of what it gets.
_PROMPT: Final = {
    "add_generation_prompt",
    "continue_final_message",
    "cache_prompt",
    "mm_processor_kwargs",
}

#: What a client may say to the engine past the router.
PASSED: Final = frozenset(
    _TOOLS | _FORMAT | _LOGPROBS | _SAMPLING | _REASONING | _PROMPT
)

#: Never taken from a job's extras, whoever built the job: what the router
#: decides (place, order, number, identity, shape of the stream), and what lets
#: a client run code or read state in an engine.
OWNED: Final = READ | {
    # place, order and identity of a generation
    "id_slot",
    "rid",
    "request_id",
    "priority",
    "data_parallel_rank",
    "routed_dp_rank",
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "cache_salt",
    "session_params",
    "lora",
    "lora_path",
    # how much of the engine one request takes
    "n_predict",
    "n_cmpl",
    "best_of",
    "use_beam_search",
    # the shape of the stream, which the router reads
    "echo",
    "return_progress",
    "return_tokens",
    "return_token_ids",
    "timings_per_token",
    "sse_ping_interval",
    "stream_interval",
    "prompt_logprobs",
    "post_sampling_probs",
    "n_probs",
    # code and state
    "chat_template",
    "custom_logit_processor",
    "logits_processors",
    "vllm_xargs",
    "input_ids",
}
