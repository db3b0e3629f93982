"""`with_id`: an id that copies of a message share, and equal messages do not."""

from __future__ import annotations

import json
import math
import time
import uuid
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from nsqdedupe import ConfigError, json_field, with_id


@pytest.mark.parametrize(
    "document", [{"a": 1, "b": "grüße"}, MappingProxyType({"a": 1, "b": "grüße"}), '{"a": 1, "b": "grüße"}'.encode()]
)
def test_an_id_is_added_in_front_and_the_rest_stays(document: Any) -> None:
    body = with_id(document)
    fields = json.loads(body)
    assert list(fields) == ["messageId", "a", "b"]
    assert (fields["a"], fields["b"]) == (1, "grüße")
    assert "grüße".encode() in body
    key = json_field("messageId")(SimpleNamespace(body=body))
    assert key == fields["messageId"].encode()


def test_equal_documents_get_ids_that_differ_and_sort_by_time() -> None:
    before = time.time_ns() // 1_000_000
    ids = []
    for _ in range(50):
        ids.append(uuid.UUID(json.loads(with_id({"a": 1}))["messageId"]))
        started = time.time_ns()
        while time.time_ns() < started + 2000:
            """Two microseconds: the ids tell quarters of one apart."""
    assert len(set(ids)) == 50
    assert ids == sorted(ids)
    assert {(one.version, one.variant) for one in ids} == {(7, uuid.RFC_4122)}
    assert before <= ids[0].int >> 80 <= ids[-1].int >> 80 <= time.time_ns() // 1_000_000


@pytest.mark.parametrize("value", ["order-7", 7, 0])
def test_an_id_that_is_there_stays(value: object) -> None:
    body = with_id({"id": value, "a": 1}, field="id")
    assert json.loads(body) == {"id": value, "a": 1}
    assert with_id(body, field="id") == body


def test_the_document_is_not_changed() -> None:
    document = {"a": 1}
    with_id(document)
    assert document == {"a": 1}


def nested(depth: int) -> dict[str, object]:
    document: dict[str, object] = {}
    for _ in range(depth):
        document = {"a": document}
    return document


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (None, "mapping or JSON text, not NoneType"),
        ([1], "not list"),
        (b"[1]", "JSON object, not list"),
        (b"[" * 100_000, "no JSON text: it is nested too deeply"),
        (nested(100_000), "written as JSON: it is nested too deeply"),
        (b"secret", "no JSON text: Expecting value at character 0"),
        (b'{"a": "\xff"}', "no JSON text: it is not UTF-8$"),
        ({"a": math.nan}, "written as JSON"),
        ({"a": b"secret"}, "written as JSON"),
        ({"messageId": ""}, "holds an empty string, which"),
        ({"messageId": None}, "NoneType"),
        ({"messageId": True}, "bool"),
        ({"messageId": ["secret"]}, "list"),
    ],
)
def test_what_cannot_have_an_id_is_refused_and_not_shown(document: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        with_id(document)
    assert "secret" not in str(caught.value)


def test_it_is_written_without_spaces() -> None:
    assert with_id({"messageId": 1, "a": [1, 2]}) == b'{"messageId":1,"a":[1,2]}'


def test_what_cannot_be_written_is_told() -> None:
    with pytest.raises(ConfigError, match="Object of type set is not JSON serializable"):
        with_id({"a": set()})


@pytest.mark.parametrize("field", ["", "a.b", None, 1])
def test_a_field_that_a_key_could_not_name_is_refused(field: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        with_id({}, field=field)
    text = f'field={field!r}: must be the name of a field, without dots; for example "messageId"'
    assert str(caught.value) == text
