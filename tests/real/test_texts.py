"""O2: completions and embeddings of real llama.cpp servers, by the openai SDK."""

from collections.abc import Iterator

import openai
import pytest

from tests.kit.processes import Daemon, daemon, llama_servers, worker_table

pytestmark = pytest.mark.real

MODEL = "smollm2"


def client(router: Daemon) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=20
    )


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon in front of one server that embeds and one that chats."""
    with llama_servers(1, 2, embeddings=True) as [one], llama_servers(1, 2) as [other]:
        tables = (
            worker_table("e", one.url, 'models = ["embedder"]'),
            worker_table("c", other.url),
        )
        folder = tmp_path_factory.mktemp("embedder")
        with daemon(folder, "\n".join(tables)) as started:
            started.await_ready(2)
            yield started


def test_o2_a_completion_is_the_same_streamed_and_whole(router: Daemon) -> None:
    with client(router) as sdk:
        ask = {"model": MODEL, "prompt": "Once upon a", "max_tokens": 8, "seed": 1}
        whole = sdk.completions.create(**ask, temperature=0)  # type: ignore[call-overload]
        chunks = list(
            sdk.completions.create(  # type: ignore[call-overload]
                **ask,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )

    *body, usage = chunks
    assert usage.choices == []
    assert usage.usage.completion_tokens == 8
    assert "".join(c.choices[0].text for c in body) == whole.choices[0].text != ""
    assert body[-1].choices[0].finish_reason == "length"
    assert whole.object == "text_completion"
    assert whole.usage.completion_tokens == 8


def test_o2_a_prompt_of_token_numbers_is_taken(router: Daemon) -> None:
    with client(router) as sdk:
        reply = sdk.completions.create(model=MODEL, prompt=[504, 3575], max_tokens=3)

    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 2


def test_o2_several_prompts_are_refused_before_a_worker(router: Daemon) -> None:
    with client(router) as sdk, pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(model=MODEL, prompt=["a", "b"])

    assert refused.value.param == "prompt"


def test_o2_texts_are_embedded(embedder: Daemon) -> None:
    texts = ["a river", "a stream of water", "the stock exchange"]
    with client(embedder) as sdk:
        reply = sdk.embeddings.create(model="embedder", input=texts)
        plain = sdk.embeddings.create(
            model="embedder", input=texts[0], encoding_format="float"
        )

    assert reply.model == "embedder"
    assert [e.index for e in reply.data] == [0, 1, 2]
    vectors = [e.embedding for e in reply.data]
    assert len({len(vector) for vector in vectors}) == 1
    assert plain.data[0].embedding == pytest.approx(vectors[0], abs=1e-3)
    assert reply.usage.prompt_tokens > 0
    for vector in vectors:
        assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-3)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-3)


def test_o2_a_model_that_only_chats_embeds_nothing_and_goes_on_chatting(
    embedder: Daemon,
) -> None:
    with client(embedder) as sdk:
        for _ in range(3):
            with pytest.raises(openai.BadRequestError) as refused:
                sdk.embeddings.create(model=MODEL, input="a")
            assert refused.value.code == "unsupported_endpoint"
        reply = sdk.completions.create(model=MODEL, prompt="a", max_tokens=1)

    assert reply.choices[0].finish_reason
    states = {w["name"]: w["state"] for w in embedder.status()["workers"]}
    assert states == {"e": "ready", "c": "ready"}
