"""The scheduler's page over HTTP: for whoever has the token, read-only, alive as long as the run is."""

import asyncio
import contextlib
import json
import shutil
import stat
from pathlib import Path

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gyre_sched.config import SchedConfig
from gyre_sched.errors import SchedError
from gyre_sched.face import web as pages
from gyre_sched.face.config import WebConfig
from gyre_sched.face.web import Web, make_token
from gyre_sched.journal import encode, read_journal
from gyre_sched.protocol import Event
from gyre_transport.config import section
from gyre_transport.errors import ConfigError

RUN = Path(__file__).parents[1] / "fixtures" / "sched" / "run"
DEADLINE = 60.0


@pytest.fixture
def run_dir(tmp_path):
    return shutil.copytree(RUN, tmp_path / "run")


@pytest.fixture
async def http():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE)) as session:
        yield session


def at(web, path):
    base, _, query = web.url.partition("?")
    return f"{base}{path}?{query}"


async def test_only_with_the_token(run_dir, http):
    async with Web(run_dir, WebConfig()) as web:
        bare, _, query = web.url.partition("?")
        token = query.partition("=")[2]
        for path in ("", "picture", "events", "metrics"):
            async with http.get(bare + path) as answer:
                assert answer.status == 401
                assert "token" in await answer.text()
            async with http.get(f"{bare}{path}?token={token[:-1]}x") as answer:
                assert answer.status == 401
        async with http.get(bare + "picture", headers={"Authorization": f"Bearer {token}"}) as answer:
            assert (await answer.json())["name"] == "quickstart"
        async with http.post(web.url) as answer:
            assert answer.status == 405
        async with http.get(web.url) as answer:
            assert answer.headers["Cache-Control"] == "no-store"
            assert "quickstart" in await answer.text()


async def test_another_sites_name_for_this_machine_reads_nothing(run_dir, http):
    async with Web(run_dir, WebConfig()) as web:
        for host, status in (("evil.example", 403), ("localhost:80", 200), ("[::1]", 200), ("127.9.9.9", 200)):
            async with http.get(web.url, headers={"Host": host}) as answer:
                assert answer.status == status, host


async def test_the_token_is_kept_for_its_owner_and_for_the_next_scheduler(run_dir):
    async with Web(run_dir, WebConfig()) as web:
        first = web.url
    kept = run_dir / "sched" / "web-token"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    async with Web(run_dir, WebConfig()) as web:
        assert web.url.partition("?")[2] == first.partition("?")[2]
    kept.write_text("short")
    with pytest.raises(SchedError, match="remove the file"):
        make_token(kept)


async def test_newer_pictures_are_sent_as_the_journal_grows(run_dir, http):
    journal = run_dir / "sched" / "journal"
    last = read_journal(journal).events[-1]
    async with Web(run_dir, WebConfig(period=0.01)) as web, http.get(at(web, "events")) as stream:
        assert stream.content_type == "text/event-stream"

        async def picture():
            async for line in stream.content:
                if line.startswith(b"data: "):
                    return json.loads(line[6:])
            raise AssertionError("the stream ended")

        async with asyncio.timeout(DEADLINE):
            assert (await picture())["seq"] == last.seq
            for n in range(1, 4):
                numbers = {"version": 6 + n, "bytes": 1}
                with journal.open("ab") as f:
                    f.write(encode(Event(seq=last.seq + n, at=last.at + n, kind="published", numbers=numbers)))
                assert (await picture())["version"] == 6 + n


async def test_a_bound_on_open_pages(run_dir, http, monkeypatch):
    monkeypatch.setattr(pages, "_BEAT", 0.05)  # seconds until it is noticed that a page is gone
    async with Web(run_dir, WebConfig(readers=2, period=0.01)) as web:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                stream = await stack.enter_async_context(http.get(at(web, "events")))
                await stream.content.readline()
            async with http.get(at(web, "events")) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "10")
                assert "sched.web.readers" in await answer.text()
        async with asyncio.timeout(DEADLINE):
            while True:  # a page that was closed makes room
                async with http.get(at(web, "events")) as answer:
                    if answer.status == 200:
                        break


async def test_closing_ends_open_pages(run_dir, http):
    web = Web(run_dir, WebConfig())
    await web.start()
    async with http.get(at(web, "events")) as stream:
        await stream.content.readline()
        async with asyncio.timeout(DEADLINE):
            await web.close()
            with contextlib.suppress(aiohttp.ClientPayloadError):
                await stream.content.read()


async def test_prometheus_reads_it(run_dir, http):
    async with Web(run_dir, WebConfig()) as web, http.get(at(web, "metrics")) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        found = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(await answer.text())
            for sample in family.samples
        }
    assert found[("gyre_executions_dispatched_total",)] == 192
    assert found[("gyre_weights_version",)] == 6
    assert found[("gyre_proxy_calls",)] == 716
    assert found[("gyre_failures_total", ("kind", "return_failed"))] == 2
    assert found[("gyre_cell_role", ("cell", "0"), ("role", "failed"))] == 1
    assert found[("gyre_cell_role", ("cell", "0"), ("role", "training"))] == 0
    assert found[("gyre_cell_role_seconds_total", ("cell", "1"), ("role", "rollout"))] == pytest.approx(384, abs=2)
    assert found[("gyre_step_mean_score",)] == pytest.approx(0.7305, abs=1e-3)


async def test_a_port_in_use(run_dir):
    async with Web(run_dir, WebConfig()) as web:
        port = int(web.url.split(":")[2].split("/")[0])
        with pytest.raises(SchedError, match=r"sched\.web\.port"):
            await Web(run_dir, WebConfig(port=port)).start()


async def test_a_run_whose_journal_cannot_be_read(run_dir, http):
    async with Web(run_dir, WebConfig()) as web:
        (run_dir / "sched" / "journal").unlink()
        (run_dir / "sched" / "journal").mkdir()
        async with http.get(web.url) as answer:
            assert answer.status == 503
            assert "cannot read the journal" in await answer.text()


def test_config():
    config = section({"sched": {"web": {"port": 8123, "host": "::1"}}}, "sched", SchedConfig)
    assert (config.web.on, config.web.port) == (True, 8123)
    for wrong, said in (({"host": "gyre.example"}, "IP address"), ({"port": 70000}, "65535"), ({"prot": 1}, "prot")):
        with pytest.raises(ConfigError, match=said):
            section({"sched": {"web": wrong}}, "sched", SchedConfig)
    assert msgspec.to_builtins(SchedConfig())["web"]["host"] == "127.0.0.1"
