"""Tool calls in the text of models, whole and in pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.model.tool_calls import ToolCallParser, tool_format

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

CASES = [
    ("hermes", "plain text", "plain text", []),
    ("hermes", CALL, "", [("add", {"a": 1})]),
    (
        "hermes",
        f"Let me see.\n\n{CALL}\n{CALL.replace('add', 'sub')}\n",
        "Let me see.",
        [("add", {"a": 1}), ("sub", {"a": 1})],
    ),
    ("hermes", f"<think>a < b</think>\n{CALL} done", "<think>a < b</think> done", [("add", {"a": 1})]),
    ("hermes", "<tool_call>{broken}</tool_call> then", "<tool_call>{broken}</tool_call> then", []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", 'cut <tool_call>{"name": "add"', 'cut <tool_call>{"name": "add"', []),
    ("hermes", "a <tool", "a <tool", []),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 2}"}</tool_call>', "", [("f", {"x": 2})]),
    ("llama", '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {}}', "", [("add", {})]),
    (
        "llama",
        ' {"name": "a", "parameters": {}}; {"name": "b", "arguments": {"x": [1]}}',
        "",
        [("a", {}), ("b", {"x": [1]})],
    ),
    ("llama", '{"answer": 3}', '{"answer": 3}', []),
    ("llama", '{"name": "a", "parameters": {}} and text', '{"name": "a", "parameters": {}} and text', []),
    ("llama", "the sum is {3}", "the sum is {3}", []),
    ("llama", "<|pyth", "<|pyth", []),
]


@pytest.mark.parametrize("format, text, content, calls", CASES)
def test_calls_and_content_are_the_same_whole_and_in_pieces(format, text, content, calls):
    for size in (len(text), 1, 2, 5):
        parser, found, seen = ToolCallParser(format), [], ""
        for start in range(0, len(text), size):
            more, new = parser.add(text[start : start + size])
            seen, found = seen + more, found + new
        more, new = parser.finish()
        assert seen + more == content
        assert [(call.name, json.loads(call.arguments)) for call in found + new] == calls


def test_content_is_given_out_as_soon_as_it_cannot_start_a_call():
    parser = ToolCallParser("hermes")
    assert [parser.add(piece)[0] for piece in ("a b ", "c <to", "ast", "> <tool_call>")] == [
        "a b",
        " c",
        " <toast",
        ">",
    ]
    parser = ToolCallParser("llama")
    assert [parser.add(piece)[0] for piece in (" ", "<", "b>", "{")] == ["", "", " <b>", "{"]


def test_deep_nesting_is_no_call_and_no_crash():
    text = '<tool_call>{"name": "f", "arguments": ' + "[" * 100_000 + "</tool_call>"
    content, calls = ToolCallParser("hermes").finish(text)
    assert content == text and not calls


def test_the_format_follows_from_the_template():
    assert tool_format("…return it within <tool_call></tool_call>…") == "hermes"
    assert tool_format("<|start_header_id|>{{ role }}") == "llama"
    assert tool_format("<start_of_turn>") is None


CALLS = (CALL, '{"name": "f", "arguments": {"a": "<tool_call>"}}', '{"name": "f", "parameters": {}}', '{"name": "f"}')
MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "{", "}", ";", " ", "\n", "<", "null")
PIECES = st.one_of(st.sampled_from((*CALLS, *MARKS)), st.text(max_size=3))


@given(st.sampled_from(["hermes", "llama"]), st.lists(PIECES, max_size=10).map("".join), st.integers(1, 12))
def test_any_text_is_separated_alike_whole_and_in_pieces(format, text, size):
    parser = ToolCallParser(format)
    whole, calls = ToolCallParser(format).finish(text)
    parts = [*(parser.add(text[start : start + size]) for start in range(0, len(text), size)), parser.finish()]
    assert "".join(content for content, _ in parts) == whole
    assert [call for _, found in parts for call in found] == calls
    assert all(call.name and isinstance(json.loads(call.arguments), dict) for call in calls)
    assert calls or whole == text
