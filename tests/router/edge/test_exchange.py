import pytest

from router.edge.exchange import Answer, compose, printable, refusal, safe_id


def test_a_reply_is_a_status_line_fields_and_a_body() -> None:
    answer = Answer(503, b"{}", headers=((b"retry-after", b"1"),))

    assert compose(answer, b"x-request-id: 7\r\n", keep=True) == (
        b"HTTP/1.1 503 Service Unavailable\r\n"
        b"content-type: application/json\r\n"
        b"content-length: 2\r\n"
        b"x-request-id: 7\r\n"
        b"retry-after: 1\r\n"
        b"\r\n"
        b"{}"
    )


def test_a_status_without_a_known_reason_is_still_a_status_line() -> None:
    assert compose(Answer(418, b""), b"", keep=True).startswith(b"HTTP/1.1 418 ")


def test_h1_how_the_connection_goes_on_is_said_where_it_is_not_understood() -> None:
    answer = Answer(200, b"")

    assert b"connection" not in compose(answer, b"", keep=True)
    assert b"connection: close\r\n" in compose(answer, b"", keep=False)
    assert b"connection: keep-alive\r\n" in compose(answer, b"", keep=True, minor=0)


def test_h3_a_request_id_is_short_and_safe_or_not_the_clients() -> None:
    assert safe_id(b"a-Z_0.9") == b"a-Z_0.9"
    assert safe_id(b"x" * 128) == b"x" * 128
    for bad in (None, b"", b"x" * 129, b"a b", b"a\r\nb", b"a/b", "é".encode()):
        assert safe_id(bad) is None


def test_a_worker_with_an_odd_name_makes_no_odd_header() -> None:
    assert printable("gpu-1.lan:8080") == b"gpu-1.lan:8080"
    assert printable("büro\r\nx: y") == b"b?ro??x:?y"


@pytest.mark.parametrize(
    ("status", "worth_it"),
    [(status, False) for status in (400, 401, 404, 405, 413, 415, 417, 431, 501)]
    + [(408, True), (503, True)],
)
def test_o5_a_refusal_says_whether_to_ask_again(status: int, worth_it: bool) -> None:
    headers = refusal(status, "No.").headers

    assert headers == (() if worth_it else ((b"x-should-retry", b"false"),))


def test_o5_a_refusal_has_the_openai_shape() -> None:
    answer = refusal(404, "Nothing here.", code="c")

    assert answer.body == (
        b'{"error":{"message":"Nothing here.","type":"invalid_request_error",'
        b'"param":null,"code":"c"}}'
    )
