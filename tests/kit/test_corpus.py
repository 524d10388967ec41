"""The corpus reads as it is written, and is as large as promised."""

from collections import Counter

from tests.kit.corpus import FOLDER, request_cases, response_cases


def test_h2_the_corpus_holds_at_least_250_requests_and_60_answers() -> None:
    assert len(request_cases()) >= 250
    assert len(response_cases()) >= 60


def test_every_file_of_the_corpus_is_read() -> None:
    classes = {case.name.partition(":")[0] for case in request_cases()}
    answers = {case.name.partition(":")[0] for case in response_cases()}

    assert classes == {path.stem for path in (FOLDER / "requests").iterdir()}
    assert answers == {path.stem for path in (FOLDER / "responses").iterdir()}


def test_no_two_cases_have_one_name() -> None:
    names = Counter(case.name for case in request_cases())
    names.update(f"response {case.name}" for case in response_cases())

    assert [name for name, times in names.items() if times > 1] == []


def test_every_case_cites_its_rfc() -> None:
    sections = [case.rfc for case in request_cases()]
    sections += [case.rfc for case in response_cases()]

    assert [rfc for rfc in sections if not rfc.startswith("RFC ")] == []


def test_escapes_are_bytes() -> None:
    by_name = {case.name: case.raw for case in request_cases()}

    assert by_name["not_http: every byte in turn"] == bytes(range(256))


def test_fills_are_repeated() -> None:
    by_name = {case.name: case.raw for case in request_cases()}

    assert len(by_name["limits: a head of 32 KiB"]) == 32 * 1024
