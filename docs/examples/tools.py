"""A tool call by a model that knows no tool calls: asked, answered, and used.

    python docs/examples/tools.py

A worker that follows a script stands in for the model; what it says is what the
convention of ``bios`` asks of a model.
"""

import json
from collections.abc import Sequence
from typing import Any

import trio

from router.engine import Router, open_router
from router.ids import AssignmentId
from router.messages import Job
from router.settings import ModelSettings, Settings
from workers.scripted import Finish, Head, Say, ScriptedWorker, Step

BIOS = """You can call these tools, one JSON object a line:
{tools}
To call some, answer with one JSON object and nothing else:
{"tool_calls": [{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}]}
Results come back as {"tool_results": [{"name": "NAME", "content": "…"}]}.
Without a call, answer as you always do.
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def model(_: AssignmentId, job: Job) -> Sequence[Step]:
    """Play the model: call the tool first, then use what it gave."""
    if "tool_results" in job.messages[-1]["content"]:
        return (Head(), Say(("It is sunny ", "in Rome.")), Finish())
    call = '{"tool_calls": [{"name": "weather", "arguments": {"city": "Rome"}}]}'
    return (Head(), *[Say((piece,)) for piece in call.split(" ")], Finish())


async def converse(router: Router) -> None:
    """Ask, do what the model calls for, and let it go on."""
    messages: list[Any] = [{"role": "user", "content": "How is Rome?"}]
    while True:
        job = Job("told", tuple(messages), extras={"tools": [WEATHER]})
        answer = await router.complete(job)
        if not answer.tool_calls:
            print(answer.text)
            return
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.tool_calls
        ]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        for call in answer.tool_calls:
            city = json.loads(call.arguments)["city"]
            print(f"{call.name}({city})")
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
            )


async def main() -> None:
    """Run the conversation; in a file this is ``[models.told]`` with ``bios``."""
    settings = Settings(models={"told": ModelSettings(bios=BIOS)})
    worker = ScriptedWorker("scripted", model, models=("told",))
    async with open_router(settings, workers=[worker]) as router:
        await router.wait_ready()
        await converse(router)


if __name__ == "__main__":
    trio.run(main)
