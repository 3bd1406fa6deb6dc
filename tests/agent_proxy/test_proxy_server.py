"""The server: keys, errors in OpenAI's shape, closing, restarts, limits, metrics, command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import openai
import pytest

from gyre_agent_proxy import keys
from gyre_agent_proxy.errors import ListenError, UnfitEngine
from gyre_agent_proxy.recorder import Recorder
from gyre_traj.errors import LogError
from gyre_traj.log import read_log

SECRET = b"s" * 64
ASK = [{"role": "user", "content": "hi"}]


def client(proxy, key="k"):
    return openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=key, max_retries=0, timeout=30)


async def text_of(api, messages, **more):
    return (await api.chat.completions.create(model="m", messages=messages, **more)).choices[0].message.content


def go_on(*texts):
    """A conversation in which these were the answers."""
    turns = [{"role": "user", "content": "hi"}]
    for t in texts:
        turns += [{"role": "assistant", "content": t}, {"role": "user", "content": "go on"}]
    return turns


async def test_an_execution_reaches_only_its_own_history(bench):
    await bench.engine()
    async with bench.proxy(SECRET) as proxy:
        async with client(proxy, keys.make_key(SECRET, "e1")) as one, client(proxy, keys.make_key(SECRET, "e2")) as two:
            text = await text_of(one, ASK)
            await text_of(two, go_on(text))
            await text_of(one, go_on(text))
        async with client(proxy, "sk-gyre-e1.forged") as forged:
            with pytest.raises(openai.AuthenticationError):
                await text_of(forged, ASK)
    one, two = (read_log(bench.calls / f"{e}.gtraj") for e in ("e1", "e2"))
    assert [c.parent for c in one.calls] == [None, one.calls[0].call]
    assert [c.parent for c in two.calls] == [None]


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "kind"),
    [
        ("POST", "/v1/chat/completions", {}, b"{}", 401, "authentication_error"),
        ("POST", "/v1/chat/completions", {"Authorization": "Basic x"}, b"{}", 401, "authentication_error"),
        ("POST", "/v1/chat/completions", {"Authorization": "Bearer k"}, b"{", 400, "invalid_request_error"),
        ("POST", "/v1/chat/completions", {"x-api-key": "k"}, b"{}", 400, "invalid_request_error"),
        ("POST", "/v1/chat/completions", {"Authorization": "Bearer k"}, b" " * 5000, 413, "invalid_request_error"),
        ("GET", "/v1/chat/completions", {}, None, 405, "invalid_request_error"),
        ("GET", "/v1/nothing", {}, None, 404, "invalid_request_error"),
        ("GET", "/v1/models", {}, None, 401, "authentication_error"),
    ],
)
async def test_errors_have_openai_s_shape(bench, http, method, path, headers, body, status, kind):
    async with (
        bench.proxy(max_body=4000) as proxy,
        http.request(method, proxy.url + path, data=body, headers=headers) as response,
    ):
        assert response.status == status
        error = (await response.json())["error"]
    assert error["type"] == kind
    assert error["message"]
    assert not list(bench.calls.glob("*")), "a refused request leaves nothing behind"


async def test_models_health_and_stats(bench, http):
    await bench.engine()
    async with bench.proxy() as proxy, client(proxy) as api:
        assert [m.id async for m in api.models.list()] == ["policy"]
        async with http.get(f"{proxy.url}/health") as response:
            assert response.status == 200
        await text_of(api, ASK)
        async with http.get(f"{proxy.url}/gyre/stats") as response:
            stats = await response.json()
    assert (stats["calls"], stats["executions"], stats["unknown_roles"], stats["open_calls"]) == (1, 1, 1, 0)
    assert len(stats["engines"]) == 1


async def test_closing_completes_the_log_and_refuses_further_calls(bench, http):
    engine = await bench.engine()
    key = keys.make_key(SECRET, "e1")
    headers = {"Authorization": f"Bearer {key}"}
    async with bench.proxy(SECRET) as proxy, client(proxy, key) as api:
        await text_of(api, ASK)
        engine.hold = 2
        running = asyncio.create_task(text_of(api, [{"role": "user", "content": "long"}]))
        await engine.held.wait()
        for path, status, calls in (("e2", 401, None), ("e1", 200, 2), ("e1", 200, 2)):
            async with http.post(f"{proxy.url}/gyre/executions/{path}/close", headers=headers) as response:
                assert response.status == status
                if calls is not None:
                    assert (await response.json())["calls"] == calls
        assert not engine.running, "no orphan"
        with pytest.raises(openai.APIStatusError):
            await running
        with pytest.raises(openai.PermissionDeniedError, match="was closed"):
            await text_of(api, ASK)
        headers = {"Authorization": f"Bearer {keys.make_key(SECRET, 'never')}"}
        async with http.post(f"{proxy.url}/gyre/executions/never/close", headers=headers) as response:
            assert (await response.json())["calls"] == 0
    log = read_log(bench.calls / "e1.gtraj")
    assert [c.finish for c in log.calls] == ["stop", "abort"]
    assert [log.delivered[c.call] for c in log.calls] == [True, False]


async def test_a_restarted_proxy_goes_on_from_the_logs(bench, caplog):
    engine = await bench.engine()
    async with bench.proxy() as proxy, client(proxy) as api:
        first = await text_of(api, ASK)
        second = await text_of(api, go_on(first))
    (path,) = bench.calls.glob("*.gtraj")
    with path.open("ab") as f:
        f.write(b"part")  # of a record, when the proxy was killed
    async with bench.proxy() as proxy, client(proxy) as api:
        await text_of(api, go_on(first, second))
        counts = proxy.service.metrics.counts
        assert (counts["executions"], counts["calls"], counts["logs_cut"]) == (1, 3, 1), "counters go on too"
    assert "4 bytes of a record" in caplog.text
    log = read_log(path)
    a, b, c = log.calls
    assert (b.parent, c.parent) == (a.call, b.call)
    assert log.full_prompt(c.call).tolist() == engine.requests[-1]["input_ids"]


async def test_an_answer_recorded_but_not_delivered_is_given_to_the_repeated_request(bench):
    engine = await bench.engine()
    bench.brain.says("the one answer")
    async with bench.proxy() as proxy, client(proxy) as api:
        proxy.service.delivered = lambda *_, **__: None  # as if the process had died before the answer left
        await text_of(api, ASK)
    async with bench.proxy() as proxy, client(proxy) as api:
        assert await text_of(api, ASK) == "the one answer"
        assert proxy.service.metrics.counts["duplicates"] == 1
        await text_of(api, ASK)
    (path,) = bench.calls.glob("*.gtraj")
    assert len(engine.requests) == 2
    assert [c.parent for c in read_log(path).calls] == [None, None], "and after delivery a sibling"


async def test_a_full_disk_holds_the_answer_back_with_a_clear_error(bench, monkeypatch):
    await bench.engine()
    async with bench.proxy() as proxy, client(proxy) as api:
        first = await text_of(api, ASK)
        writer = next(iter(proxy.service._recorder._writers.values()))

        def full(record):
            raise LogError("no space left on device; free disk space")

        monkeypatch.setattr(writer, "append", full)
        with pytest.raises(
            openai.InternalServerError, match=r"cannot be recorded, so its answer is held back.*no space"
        ):
            await text_of(api, go_on(first))
        assert proxy.service.metrics.counts["calls_failed"] == 1
        monkeypatch.undo()
        await text_of(api, go_on(first))


async def test_too_many_open_calls_are_answered_429(bench):
    engine = await bench.engine()
    engine.hold = 1
    async with bench.proxy(queue=1) as proxy, client(proxy) as api:
        running = asyncio.create_task(text_of(api, ASK))
        await engine.held.wait()
        with pytest.raises(openai.RateLimitError) as caught:
            await text_of(api, [{"role": "user", "content": "other"}])
        assert caught.value.response.headers["retry-after"] == "1"
        engine.release()
        await running


async def test_limits_are_cut_to_what_the_context_leaves(bench):
    engine = await bench.engine()
    bench.brain.says("one two three four five six seven eight nine ten")
    async with bench.proxy(context=20) as proxy, client(proxy) as api:
        done = await api.chat.completions.create(model="m", messages=ASK, max_tokens=10_000)
        assert done.choices[0].finish_reason == "length"
        assert done.usage.total_tokens == 20
        with pytest.raises(openai.BadRequestError, match="context takes 20") as caught:
            await text_of(api, [{"role": "user", "content": "hi " * 50}])
        assert caught.value.code == "context_length_exceeded"
    assert len(engine.requests) == 1


async def test_unknown_fields_are_kept_in_the_record(bench):
    await bench.engine()
    async with bench.proxy() as proxy, client(proxy) as api:
        headers = {"x-gyre-role": "sub-agent"}
        await text_of(
            api, ASK, extra_body={"odd": {"x": [1]}, "huge": 10**30, "gyre": 1}, user="u", extra_headers=headers
        )
    (path,) = bench.calls.glob("*.gtraj")
    (call,) = read_log(path).calls
    assert call.request["odd"] == {"x": [1]}
    assert call.request["user"] == "u"
    assert float(call.request["huge"]) == 1e30
    assert set(call.request["gyre"]) == {"key", "depth", "digest", "reply"}
    assert call.role == "sub-agent"
    assert call.sampling["temperature"] == 1.0


async def test_two_proxies_never_write_one_log(bench, tmp_path):
    await bench.engine()
    key = "same"
    async with bench.proxy() as a, bench.proxy() as b, client(a, key) as one, client(b, key) as two:
        await text_of(one, ASK)
        with pytest.raises(openai.InternalServerError, match="another writer"):
            await text_of(two, ASK)


async def test_a_port_in_use_is_a_clear_error(bench):
    async with bench.proxy() as proxy:
        port = int(proxy.url.rpartition(":")[2])
        with pytest.raises(ListenError, match=f"127.0.0.1:{port}: the port is in use"):
            async with bench.proxy(port=port):
                pass


async def test_metrics_are_a_whole_file_at_the_end(bench):
    await bench.engine()
    async with bench.proxy() as proxy, client(proxy) as api:
        assert json.loads(bench.metrics.read_bytes())["calls"] == 0
        await text_of(api, ASK)
    counts = json.loads(bench.metrics.read_bytes())
    assert counts["calls"] == counts["roots"] == counts["attempts"] == 1
    assert counts["completion_tokens"] > 0


def test_recorder_refuses_a_folder_it_cannot_use(tmp_path):
    from gyre_agent_proxy.errors import RecordError

    (tmp_path / "calls").write_text("a file")
    with pytest.raises(RecordError):
        Recorder(tmp_path / "calls").open("e")


# --- the command line ----------------------------------------------------------------------------------------------

CLI = [sys.executable, "-m", "gyre_agent_proxy.cli"]


def test_help_is_light():
    code = "import sys, gyre_agent_proxy.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "heavy = {'torch', 'transformers', 'aiohttp', 'numpy', 'tokenizers', 'renderers'} & set(sys.modules)\n"
    assert subprocess.run([sys.executable, "-c", code + "assert not heavy, heavy"], check=True, capture_output=True)


def test_the_proxy_imports_neither_torch_nor_transformers_nor_renderers():
    code = "import sys, gyre_agent_proxy.serve, gyre_agent_proxy.render, tokenizers, jinja2\n"
    code += (
        "heavy = {'torch', 'transformers', 'sglang', 'renderers', 'openai'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("arguments", [[], ["serve"], ["serve", "--engine", "http://x"], ["nothing"]])
def test_wrong_usage_is_exit_code_2(arguments):
    done = subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_bad_input_is_one_line_and_exit_code_1(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text('[run]\ndir = "x"\n[proxy]\nkeepalve = 3\n')
    for arguments, complaint in (
        (["--config", str(config)], "did you mean 'keepalive'?"),
        (["--config", str(tmp_path / "none.toml")], "cannot read the config"),
        (["--engine", "http://x", "--model", str(tmp_path)], "needs a tokenizer.json"),
    ):
        done = subprocess.run([*CLI, "serve", *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert done.returncode == 1
        assert complaint in done.stderr
        assert "Traceback" not in done.stderr


def test_roles_prints_the_table():
    done = subprocess.run([*CLI, "roles"], capture_output=True, text=True, check=True, timeout=60)
    assert "opencode" in done.stdout
    done = subprocess.run([*CLI, "roles", "--json"], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["rules"]


async def test_serve_alone_until_sigterm(bench, tmp_path):
    engine = await bench.engine()
    process = await asyncio.create_subprocess_exec(
        *CLI, "serve", "--engine", engine.url, "--model", str(bench.folder), "--port", "0", "--calls", str(bench.calls),
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        url = line.split()[-1]
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as api:
            bench.brain.says("hello")
            assert await text_of(api, ASK) == "hello"
    finally:
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), 30)
    assert code == 0
    assert len(list(bench.calls.glob("*.gtraj"))) == 1


async def test_serve_in_a_run(bench, tmp_path, http, tmp_path_factory):
    from gyre_transport.process import Child
    from gyre_transport.run import RunDir

    engine = await bench.engine()
    bus = tmp_path_factory.mktemp("b")
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text(
        f'[run]\ndir = "{run.path}"\n[bus]\ndir = "{bus}"\n[model]\npath = "{bench.folder}"\nname = "policy"\n'
        f'[engine]\ncontext_length = 64\n[proxy]\nengines = ["{engine.url}"]\n'
    )
    child = await Child.start("proxy", [*CLI, "serve", "--config", str(run.config)], log=run.logs / "proxy.log")
    try:
        url = child.info["url"]
        key = keys.make_key(keys.load_secret(run.secret), "t0.g0.e0")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as api:
            await text_of(api, ASK)
        assert engine.requests[0]["sampling_params"]["max_new_tokens"] < 64
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(f"{url}/gyre/executions/t0.g0.e0/close", headers=headers) as response:
            assert await response.json() == {"execution": "t0.g0.e0", "calls": 1, "failing": ""}
    finally:
        assert await child.stop() == 0, child.tail()
    log = read_log(run.log("t0.g0.e0"))
    assert [log.delivered[c.call] for c in log.calls] == [True]
    assert json.loads((run.metrics / "proxy.json").read_bytes())["calls"] == 1


async def test_a_run_s_proxy_is_ready_before_its_scheduler(bench, tmp_path, tmp_path_factory):
    from gyre_transport.process import Child

    config = tmp_path / "config.toml"
    config.write_text(
        f'[run]\ndir = "{tmp_path}"\n[bus]\ndir = "{tmp_path_factory.mktemp("b")}"\n[model]\npath = "{bench.folder}"\n'
    )
    child = await Child.start("proxy", [*CLI, "serve", "--config", str(config)], log=tmp_path / "proxy.log")
    assert await child.stop() == 0, child.tail()


# --- limits and the start-up probe --------------------------------------------------------------------------------


async def test_the_probe_refuses_what_strips_log_probabilities(bench):
    engine = await bench.engine()
    engine.logprobs = False
    with pytest.raises(UnfitEngine, match="without their log-probabilities"):
        async with bench.proxy(probe_wait=10.0):
            pass


async def test_the_probe_refuses_what_is_no_engine(bench):
    engine = await bench.engine()
    engine.report = (0, {"message": "unknown model", "code": 404})
    with pytest.raises(UnfitEngine, match="unknown model"):
        async with bench.proxy(probe_wait=10.0):
            pass


async def test_an_engine_that_comes_later_is_no_reason_to_stop(bench):
    engine = await bench.engine()
    port = int(engine.url.rpartition(":")[2])
    await engine.stop()
    async with bench.proxy(probe_wait=10.0) as proxy, client(proxy) as api:
        waiting = asyncio.create_task(api.chat.completions.create(model="m", messages=ASK))
        await engine.start(port)
        assert (await waiting).choices[0].message.content
