"""Keys out of JSON bodies: the same with msgspec and without it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqdedupe.errors import ConfigError, KeyExtractionError
from nsqdedupe.fingerprint import JsonField, json_field

MakeField = Callable[[str], JsonField]


def without_msgspec(path: str) -> JsonField:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "msgspec", None)
        return json_field(path)


@pytest.fixture(params=[json_field, without_msgspec], ids=["msgspec", "stdlib"])
def make_field(request: pytest.FixtureRequest) -> MakeField:
    return request.param


def test_msgspec_is_used_where_it_is_installed_and_only_there() -> None:
    body = b'{"id":"a"}'
    assert json_field("id")._quickly(body) == b"a"
    assert without_msgspec("id")._quickly(body) == b""
    assert without_msgspec("id").of_body(body) == b"a"


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("id", b'{"id":"a"}', b"a"),
        ("id", b' {"x":[1,{"id":2}], "id" : "a" }\n', b"a"),
        ("id", b'{"id":7}', b"7"),
        ("id", b'{"id":"7"}', b"7"),
        ("id", b'{"id":-7}', b"-7"),
        ("id", b'{"id":-0}', b"-0"),
        ("id", b'{"id":9007199254740993}', b"9007199254740993"),
        ("id", b'{"id":%s,"x":%s}' % (b"9" * 5000, b"8" * 5000), b"9" * 5000),
        ("id", '{"id":"é€😀"}'.encode(), "é€😀".encode()),
        ("id", rb'{"id":"\u00e9\u20ac\ud83d\ude00"}', "é€😀".encode()),
        ("id", rb'{"id":"a\nb\/\"\\"}', b'a\nb/"\\'),
        ("id", rb'{"id":"a\u0000b"}', b"a\0b"),
        ("id", b'{"id":" "}', b" "),
        ("id", b'{"id":1,"id":"last"}', b"last"),
        ("id", b'{"id":null,"id":"last"}', b"last"),
        ("id", rb'{"i\u0064":"escaped"}', b"escaped"),
        ("id", rb'{"x":"\ud800","id":"a"}', b"a"),
        ("id", b'{"x":1e400,"id":"a"}', b"a"),
        ("a.b.c", b'{"a":{"x":0,"b":{"c":"deep"}}}', b"deep"),
        ("a.b", b'{"a":{},"a":{"b":1}}', b"1"),
        ("a.b", b'{"a":5,"a":{"b":1}}', b"1"),
        ("a.b", b'{"a":{"b":1},"a":{"b":2}}', b"2"),
        ("é", '{"é":1}'.encode(), b"1"),
        ('say "id"', rb'{"say \"id\"":1}', b"1"),
        ("back\\slash", rb'{"back\\slash":1}', b"1"),
    ],
)
def test_a_whole_numbers_digits_and_a_strings_utf8_are_the_key(
    make_field: MakeField, path: str, body: bytes, key: bytes
) -> None:
    assert make_field(path).of_body(body) == key
    assert make_field(path)(SimpleNamespace(body=body)) == key


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("id", b'{"id":null}', "field 'id' is null; a key is a string or a whole number"),
        ("id", b'{"id":true}', "field 'id' is a boolean"),
        ("id", b'{"id":1.0}', "field 'id' is no whole number"),
        ("id", b'{"id":1e3}', "field 'id' is no whole number"),
        ("id", b'{"id":{"hush":1}}', "field 'id' is an object"),
        ("id", b'{"id":["hush"]}', "field 'id' is an array"),
        ("id", b'{"id":""}', "field 'id' is empty"),
        ("id", b'{"id":1,"id":null}', "field 'id' is null"),
        ("id", rb'{"id":"hush\ud800"}', "field 'id' has half a surrogate pair at character 4"),
        ("id", b'{"ID":"hush"}', "field 'id' is absent"),
        ("id", b'["hush"]', "field 'id' is absent"),
        ("id", b'"hush"', "field 'id' is absent"),
        ("id", b"17", "field 'id' is absent"),
        ("a.b", b'{"a":"hush"}', "field 'a.b' is absent"),
        ("a.b", b'{"a":{"b":1},"a":{}}', "field 'a.b' is absent"),
        ("a.b", b'{"a.b":"hush"}', "field 'a.b' is absent"),
        ("0", b'["hush"]', "field '0' is absent"),
        ("id", b"", "the body is not JSON"),
        ("id", b"hush", "the body is not JSON"),
        ("id", b'{"id":"hush"', "the body is not JSON"),
        ("id", b'{"id":"hush"} x', "the body is not JSON"),
        ("id", b'{"id":"hush",}', "the body is not JSON"),
        ("id", b'{"id":007}', "the body is not JSON"),
        ("id", b'{"id":"hu\nsh"}', "the body is not JSON"),
        ("id", b'{"x":"\1","id":"hush"}', "the body is not JSON"),
        ("id", rb'{"x":"\q","id":"hush"}', "the body is not JSON"),
        ("id", b'{"x":NaN,"id":"hush"}', "the body is not JSON: NaN is no JSON"),
        ("id", b'{"x":-Infinity,"id":"hush"}', "the body is not JSON"),
        ("id", b'\xef\xbb\xbf{"id":"hush"}', "the body is not JSON"),
        ("id", '{"id":"hush"}'.encode("utf-16"), "the body is not UTF-8 at byte 0"),
        ("id", b'{"id":"hush\xff"}', "the body is not UTF-8 at byte 11"),
        ("id", b'{"x":"\xff","id":"hush"}', "the body is not UTF-8 at byte 6"),
        ("id", b'{"x":"\xed\xa0\x80","id":"hush"}', "the body is not UTF-8 at byte 6"),
        ("id", b'{"x":%s%s,"id":"hush"}' % (b"[" * 100_000, b"]" * 100_000), "the body is not JSON"),
    ],
)
def test_what_is_no_key_is_refused_and_not_shown(make_field: MakeField, path: str, body: bytes, text: str) -> None:
    with pytest.raises(KeyExtractionError, match=text) as caught:
        make_field(path).of_body(body)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("path", ["", ".", "a.", ".a", "a..b", "\ud800", None, 5, ["id"]])
def test_a_path_that_leads_nowhere_is_refused(make_field: MakeField, path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"path={path!r}: must be the name of a field")):
        make_field(path)


names = st.sampled_from(["id", "a", "b", "é", 'a"b'])
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["\ud800", "\n", "/", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=8,
)
documents = st.builds(
    lambda value, ascii_only: json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass"),
    st.dictionaries(names, values, max_size=5),
    st.booleans(),
)
scraps = st.lists(
    st.sampled_from(rb'{ } [ ] : , " "id" "a" \ \u0069 \ud800 1 -0 .5 e1 true null NaN "x" "\n"'.split())
    | st.sampled_from([b" ", b"\n", b"\0", b"\xff", "é".encode(), b'"id":1', b'"id":"k"']),
    max_size=14,
).map(b"".join)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    document = draw(documents)
    at = draw(st.integers(0, len(document)))
    return document[:at] + draw(st.binary(max_size=2)) + document[at + draw(st.integers(0, 2)) :]


FIELDS = {path: (json_field(path), without_msgspec(path)) for path in ("id", "a.id", "é", 'a"b')}


@settings(max_examples=400)
@given(body=documents | damaged() | scraps)
def test_msgspec_changes_no_key_and_no_refusal(body: bytes) -> None:
    for quick, careful in FIELDS.values():
        assert outcome(quick, body) == outcome(careful, body)


def outcome(field: JsonField, body: bytes) -> bytes | str:
    try:
        return field.of_body(body)
    except KeyExtractionError as error:
        return str(error)
