"""The page: one file, nothing from elsewhere, what the run says is never markup; seen in a browser if there is one."""

import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from gyre_sched.errors import SchedError
from gyre_sched.face.follow import Follower
from gyre_sched.face.page import render, write_report

RUN = Path(__file__).parents[1] / "fixtures" / "sched" / "run"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in BROWSERS if (found := shutil.which(name))), None)


def test_the_policy_allows_the_pages_own_parts_only():
    html = render(Follower(RUN).look(), live=False)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    for part, name in ((script, "script-src"), (style, "style-src")):
        assert f"{name} 'sha256-{b64encode(sha256(part.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none'; script-src")  # a report connects to nothing
    assert "connect-src 'self'" in render(Follower(RUN).look(), live=True)
    assert not re.search(r"""(src|href)=["']""", html)


def test_what_the_run_says_is_no_markup():
    picture = Follower(RUN).look()
    picture.name = "</script><script>alert(1)</script><!-- {{css}}"
    html = render(picture, live=False)
    assert html.count("<script") == 2
    assert "alert(1)</script>" not in html
    assert html.count("{{") == 1  # the name's own


def test_a_report_is_written_whole_or_not_at_all(tmp_path):
    picture = Follower(RUN).look()
    assert write_report(picture, tmp_path / "report.html") == (tmp_path / "report.html").stat().st_size
    with pytest.raises(SchedError, match="name a file in a folder you can write to"):
        write_report(picture, tmp_path / "missing" / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.skipif(CHROMIUM is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("damaged", [False, True])
def test_a_browser_shows_the_run(tmp_path, damaged):
    picture = Follower(RUN).look()
    if damaged:
        picture.damage, picture.halted, picture.ended = "at byte 7: torn", "the core is <b>gone</b>", False
    write_report(picture, tmp_path / "report.html")
    options = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--window-size=1400,1000"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"),
    )
    page = (tmp_path / "report.html").as_uri()
    run = subprocess.run([CHROMIUM, *options, page], capture_output=True, text=True, check=True, timeout=100)
    dom = re.sub(r"<script.*?</script>|<style.*?</style>", "", run.stdout, flags=re.DOTALL)
    text = re.sub(r"<[^>]*>", " ", dom)
    figures = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", dom))
    assert (figures["step"], figures["calls"], figures["water / capacity"]) == ("6 / 6", "716", "0 / 0")
    assert len(re.findall("<tr", dom)) == 3 + 2 + 6 + len(picture.notes)
    assert "leaves rollout: w = 22 &lt;= C_R - C_e = 64 - 32" in dom
    if damaged:
        assert "The journal is damaged at byte 7: torn" in text
        assert "the core is &lt;b&gt;gone&lt;/b&gt;" in dom
        assert "as last written" in text
    else:
        assert "ended" in text


def test_the_picture_is_plain_json():
    picture = Follower(RUN).look()
    seen = msgspec.json.decode(msgspec.json.encode(picture))
    assert seen["cells"][0]["spans"][0][0] == "starting"
    assert set(seen["seconds"]) == {"0", "1"}
