"""Keys, roles, requests, engines' pool and stream reading, as tables."""

from __future__ import annotations

import json
import os
import threading

import msgspec
import pytest

from gyre_agent_proxy import keys
from gyre_agent_proxy.conversation import Conversation, Message
from gyre_agent_proxy.dialects import chat
from gyre_agent_proxy.dialects.base import Defaults
from gyre_agent_proxy.engines import Pool, Route
from gyre_agent_proxy.errors import BadRequest, KeyFileError, RoleTableError, Unauthorized
from gyre_agent_proxy.roles import Roles
from gyre_agent_proxy.stream import Event, Events, Reader, StreamError, version_number

# --- keys ----------------------------------------------------------------------------------------------------------

SECRET = b"s" * 64


@pytest.mark.parametrize("execution", ["e1", "t-0.g3.e12", "A_b", "x" * 200])
def test_a_key_names_its_execution(execution):
    assert keys.execution_of(SECRET, keys.make_key(SECRET, execution)) == execution


@pytest.mark.parametrize(
    "key",
    [
        "",
        "sk-gyre-",
        "sk-gyre-e1",
        "sk-gyre-e1.",
        "sk-gyre-e2." + keys.make_key(SECRET, "e1").rpartition(".")[2],
        keys.make_key(b"other" * 10, "e1"),
        keys.make_key(SECRET, "e1")[len("sk-gyre-") :],
        "sk-gyre-../e1." + keys.make_key(SECRET, "e1").rpartition(".")[2],
        "sk-gyre-é.é",
    ],
)
def test_other_keys_are_refused(key):
    with pytest.raises(Unauthorized):
        keys.execution_of(SECRET, key)


@pytest.mark.parametrize("execution", ["", "a/b", "..", ".x", "a b", "x" * 201])
def test_names_that_are_no_file_names_get_no_key(execution):
    with pytest.raises(KeyFileError):
        keys.make_key(SECRET, execution)


def test_open_mode_gives_every_key_an_execution_of_its_own():
    a, b = (keys.execution_of(None, k) for k in ("any", "other"))
    assert a != b
    assert a == keys.execution_of(None, "any")
    assert keys.make_key(SECRET, a)


def test_the_secret_is_made_once_whoever_comes_first(tmp_path):
    path, found = tmp_path / "run" / "secret", []
    threads = [threading.Thread(target=lambda: found.append(keys.load_secret(path))) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 16
    assert len(set(found)) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["secret"]


def test_a_secret_others_can_read_or_that_is_short_is_refused(tmp_path):
    path = tmp_path / "secret"
    keys.load_secret(path)
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        keys.load_secret(path)
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="5 bytes"):
        keys.load_secret(path)


# --- roles ---------------------------------------------------------------------------------------------------------


def talk(system="", last="", tools=1):
    messages = (Message(role="system", text=system), Message(role="user", text=last))
    return Conversation(messages=messages, tools=({"function": {"name": "bash"}},) * tools)


CLAUDE, COMPACT = {"x-claude-code-session-id": "s"}, "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. Now"
CODEX = "x-codex-turn-metadata"


@pytest.mark.parametrize(
    ("headers", "conversation", "role", "known"),
    [
        ({}, talk(), "main", False),
        ({"x-gyre-role": "sub-agent"}, talk(), "sub-agent", True),
        (CLAUDE, talk(), "main", True),
        (CLAUDE | {"x-claude-code-agent-id": "a"}, talk(), "sub-agent", True),
        (CLAUDE, talk(last=COMPACT), "main-summary", True),
        (CLAUDE | {"x-claude-code-agent-id": "a"}, talk(last=COMPACT), "sub-agent-summary", True),
        (CLAUDE, talk(tools=0), "side", True),
        ({CODEX: '{"request_kind": "turn"}'}, talk(), "main", True),
        ({CODEX: '{"request_kind": "compaction"}'}, talk(tools=0), "main-summary", True),
        ({CODEX: "{}", "x-openai-subagent": "collab_spawn"}, talk(), "sub-agent", True),
        ({CODEX: "not json"}, talk(), "main", True),
        ({"x-session-id": "s"}, talk("You are a context summarization agent. x", tools=0), "main-summary", True),
        ({"x-session-id": "s"}, talk("You are a title generator. x", tools=0), "side", True),
        ({"x-session-id": "s", "x-parent-session-id": "p"}, talk(), "sub-agent", True),
        ({"x-session-id": "s"}, talk(), "main", True),
        ({"user-agent": "QwenCode/0.15.10 (linux; x64)"}, talk(), "main", True),
        ({}, talk("You are a general-purpose agent for"), "sub-agent", True),
        ({}, talk("You are the component that summarizes internal chat history", tools=0), "main-summary", True),
    ],
)
def test_the_table_that_ships(headers, conversation, role, known):
    assert Roles.load().role(headers, conversation) == (role, known)


def test_own_tables(tmp_path):
    path = tmp_path / "roles.toml"
    path.write_text('role_header = "x-mine"\n[[rule]]\nrole = "critic"\ntool = "bash"\nsystem_contains = "judge"\n')
    roles = Roles.load(str(path))
    assert roles.role({}, talk("be a judge")) == ("critic", True)
    assert roles.role({"x-gyre-role": "main"}, talk()) == ("main", False)
    for wrong in (
        "[[rule]]\n",
        '[[rule]]\nrole = "x"\nheadr = "y"\n',
        '[[rule]]\nrole = "x"\nheader_value = "y"\n',
        "[",
    ):
        path.write_text(wrong)
        with pytest.raises(RoleTableError):
            Roles.load(str(path))
    with pytest.raises(RoleTableError, match=r"set proxy\.roles"):
        Roles.load(str(tmp_path / "none"))


# --- Chat Completions requests -------------------------------------------------------------------------------------

USER = {"role": "user", "content": "hi"}


def read(**body):
    return chat.read_request(json.dumps({"messages": [USER], **body}).encode(), Defaults(max_tokens=77))


def test_contents_that_say_the_same_are_the_same():
    def messages(*raw):
        return read(messages=list(raw)).conversation.messages

    assert messages(USER) == messages(
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]}
    )
    forms = [None, "", [], [{"type": "text", "text": ""}]]
    assert len({messages(USER, {"role": "assistant", "content": c, "index": 3}) for c in forms}) == 1


def test_later_system_messages_stay_in_place_as_user_text():
    system = {"role": "developer", "content": "rule"}
    got = read(messages=[system, system, USER, system]).conversation.messages
    assert [m.role for m in got] == ["system", "system", "user", "user"]
    assert got[-1].text == "<system-reminder>\nrule\n</system-reminder>"


def test_sampling_and_what_is_left_over():
    request = read(
        max_completion_tokens=5, max_tokens=9, temperature=0, top_p=0.5, stop="x", seed=3, user="u", metadata={"a": 1}
    )
    assert request.sampling.max_tokens == 5
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.stop) == (0, 0.5, ("x",))
    assert request.other == {"user": "u", "metadata": {"a": 1}}
    assert read().sampling.max_tokens == 77
    assert read(stop=["a", ""]).sampling.stop == ("a",)


def test_equal_requests_have_equal_digests_whatever_their_stream_mode():
    assert read().digest == read(stream=True, stream_options={"include_usage": True}).digest
    assert read().digest != read(temperature=0.5).digest
    assert read().digest != read(messages=[USER, USER]).digest


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"messages": []}', "at least one message"),
        (b"{}", "at least one message"),
        (b'{"messages": "x"}', "messages"),
        (b'{"messages": [1]}', "messages"),
        (b'{"messages": [{"role": "robot"}]}', "robot"),
        (b'{"messages": [{"content": "x"}]}', "role"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "content"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "reads text only"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "expected a text part"),
        (b'{"messages": [{"role": "tool", "content": "x"}]}', "tool_call_id"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', "tool_calls"),
        (b'{"messages": [{"role": "assistant", "tool_calls": 5}]}', "tool_calls"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "n=2"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "top_p": -1}', "top_p"),
        (b'{"messages": [{"role": "user", "content": "x"}], "min_p": 1e308}', "min_p"),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": 1000000000000000000000}', "seed"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": ["bash"]}', "tools"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": 3}', "stop"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_wrong_requests_name_what_is_wrong(body, complaint):
    with pytest.raises(BadRequest, match=complaint):
        chat.read_request(body, Defaults(media="refuse"))


def test_what_a_text_model_cannot_read_becomes_a_counted_note():
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    request = chat.read_request(body, Defaults())
    assert request.conversation.messages[0].text == "see [image omitted: this model reads text only]"
    assert request.omitted == 1


# --- the pool ------------------------------------------------------------------------------------------------------


def pool_of(*routes):
    pool = Pool(backoff=1.0, backoff_limit=4.0)
    pool.update(1, routes)
    return pool


def take(pool, execution, now=0.0):
    state = pool.choose(execution, now)
    if state is None:
        return None
    pool.assign(execution, state)
    return state.route.name


CORE, LATER = Route("core", "u0", 2, 0, 0), Route("later", "u1", 2, 0, 1)


def test_executions_spread_evenly_and_stick():
    pool = pool_of(CORE, LATER)
    assert [take(pool, e) for e in "abcd"] == ["later", "core", "later", "core"]
    assert [take(pool, e) for e in "dcba"] == ["core", "later", "core", "later"]
    pool.forget("a")
    pool.forget("c")
    assert take(pool, "e") == "later"


def test_a_drained_engine_gets_nothing_and_its_executions_move_to_the_longest_lasting_with_room():
    alone = Route("alone", "u2", 3, 0, 9)
    pool = pool_of(CORE, LATER, alone)
    assert [take(pool, e) for e in "abcdef"] == ["alone", "later", "core", "alone", "later", "core"]
    pool.update(2, [LATER, alone], ["core"])
    assert take(pool, "c") == "alone"
    pool.update(3, [LATER, alone, CORE], [])
    assert take(pool, "f") == "core", "it is back, and its prefix may still be cached there"
    for execution in "gh":
        take(pool, execution)
    pool.forget("e")
    pool.update(4, [LATER, alone, CORE], [])
    pool.update(5, [LATER, alone], ["core"])
    assert take(pool, "f") == "later", "only it has room"


def test_older_routes_are_ignored_unless_the_scheduler_began_anew():
    pool = pool_of(CORE, LATER)
    pool.update(5, [LATER])
    assert pool.update(4, [CORE]) is False
    assert take(pool, "a") == "later"
    assert pool.update(1, [CORE], reset=True) is True
    assert take(pool, "b") == "core"


def test_failures_pause_an_engine_longer_each_time_and_a_refresh_ends_the_pause():
    pool = pool_of(CORE)
    state = pool.choose("a", 0.0)
    pauses = []
    now = 10.0
    for _ in range(4):
        pool.failed(state, now)
        pauses.append(pool.next_try(now))
        assert take(pool, "a", now + pauses[-1] - 0.1) is None
        now += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    assert take(pool, "a", now) == "core"
    pool.failed(state, 30.0)
    assert take(pool, "a", 30.0) is None
    pool.update(2, [Route("core", "u9", 2)])
    assert take(pool, "a", 30.0) == "core"
    pool.succeeded(state)
    pool.failed(state, 40.0)
    assert pool.next_try(40.0) == 1.0


def test_the_death_of_an_engine_is_one_failure_whatever_was_open_there():
    pool = pool_of(CORE)
    state = pool.choose("a", 0.0)
    for _ in range(32):
        pool.failed(state, 10.0)
    assert (state.failures, pool.next_try(10.0)) == (1, 1.0)


def test_an_engine_may_fail_for_ever():
    pool = pool_of(CORE)
    state = pool.choose("a", 0.0)
    for i in range(3000):
        pool.failed(state, 10.0 * i)
    assert pool.next_try(10.0 * 2999) == 4.0


def test_a_failed_engine_is_passed_over_while_there_is_another():
    pool = pool_of(CORE, LATER)
    assert take(pool, "a") == "later"
    pool.failed(pool.engines["later"], 0.0)
    assert take(pool, "a") == "core"
    assert take(pool, "a", 100.0) == "core", "it stays where it is"


# --- the engine's stream -------------------------------------------------------------------------------------------


def event(ids, total, logprobs="same", finish=None, versions=None):
    entries = [[-0.5, i, None] for i in ids] if logprobs == "same" else logprobs
    meta = {"completion_tokens": total, "finish_reason": finish, "output_token_logprobs": entries}
    if versions is not None:
        meta["weight_versions"] = versions
    return msgspec.convert({"output_ids": ids, "meta_info": meta}, Event)


@pytest.mark.parametrize(
    "events",
    [
        [event([1], 1), event([1, 2], 2), event([1, 2, 3, 4], 4)],
        [event([1], 1), event([2], 2), event([3, 4], 4)],
        [event([1, 2], 2), event([], 2), event([3], 3), event([1, 2, 3, 4], 4)],
        [event([1, 2], 2), event([2], 2, finish={"type": "abort"}), event([1, 2, 3, 4], 4)],
        [event([1], 1), event([1, 2], 2, [[-0.5, 2, None]]), event([3, 4], 4)],
    ],
)
def test_cumulative_and_incremental_fields_give_the_same_tokens(events):
    reader, ids, logprobs = Reader(), [], []
    for e in events:
        piece = reader.read(e)
        ids += piece.ids
        logprobs += piece.logprobs
    assert ids == [1, 2, 3, 4]
    assert logprobs == [-0.5] * 4


@pytest.mark.parametrize("logprobs", [None, [], [[None, 5, None], [-0.1, 6, None]], [[-0.1, 6, None]]])
def test_missing_logprobs_are_missing_never_zero(logprobs):
    assert Reader().read(event([5, 6], 2, logprobs)).logprobs is None


@pytest.mark.parametrize(
    "wrong",
    [
        Event(),
        msgspec.convert({"meta_info": {}}, Event),
        event([1, 2, 3], 2),
        event([1], 3),
        event(None, 1, None),
        event([1], 1, [[-0.1, 9, None]]),
        event([1], -1),
    ],
)
def test_events_that_do_not_add_up_are_errors(wrong):
    with pytest.raises(StreamError):
        Reader().read(wrong)
    reader = Reader()
    reader.read(event([7, 8, 9, 10], 4))
    with pytest.raises(StreamError):
        reader.read(event([7], 1))


def test_events_come_out_of_any_slicing_of_the_bytes():
    raw = b': ping\r\n\r\ndata: {"a": 1}\r\n\r\ndata:{"b": "\xc3\xbc"}\n\nevent: x\ndata: [DONE]\n\n'
    for size in range(1, len(raw) + 1):
        events = Events()
        got = [p for i in range(0, len(raw), size) for p in events.feed(raw[i : i + size])]
        assert got == [b'{"a": 1}', b'{"b": "\xc3\xbc"}', b"[DONE]"]


def test_version_spans_grow_with_the_label_until_the_engine_sends_its_own():
    reader = Reader()
    for total, label in ((2, "4"), (3, "4"), (5, "5")):
        e = event([0] * total, total)
        e.meta_info.weight_version = label
        piece = reader.read(e)
    assert piece.versions == (("4", 0, 3), ("5", 3, 5))
    assert reader.certain == 3, "the fourth token may be of either"
    spans = [{"version": "4", "start": 0, "end": 4}, {"version": "5", "start": 4, "end": 6}]
    assert reader.read(event([0] * 6, 6, versions=spans)).versions == (("4", 0, 4), ("5", 4, 6))
    assert reader.certain is None


@pytest.mark.parametrize(("label", "number"), [("7", 7), ("7-5d41ac0b", 7), ("default", 3), ("v2", 3), ("", 3)])
def test_version_labels(label, number):
    assert version_number(label, 3) == number
