"""A small agent: two turns, a reviewer sub-agent, a compaction and a turn after it; some calls stream.

On the task "patient" it asks for long answers until a cell has left rollout, so that calls are under way when one does,
however fast the machine is.
"""

import json
import os
import pathlib
import sys
import urllib.request

from openai import OpenAI

client = OpenAI(max_retries=0, timeout=300)
model = os.environ["MODEL"]


def ask(messages, role="main", stream=False, tokens=24):
    request = {
        "model": model,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 1.0,
        "extra_headers": {"x-gyre-role": role},
    }
    if not stream:
        return client.chat.completions.create(**request).choices[0].message.content or ""
    chunks = client.chat.completions.create(**request, stream=True)
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


instruction = pathlib.Path(sys.argv[1]).read_text()
history = [{"role": "user", "content": instruction}]
first = ask(history)
history += [{"role": "assistant", "content": first}, {"role": "user", "content": "again, other words"}]
second = ask(history, stream=True)
history.append({"role": "assistant", "content": second})
review = ask([{"role": "system", "content": "review"}, {"role": "user", "content": second}], role="sub-agent")
summary = ask([*history, {"role": "user", "content": "tell it in short"}], role="main-summary", stream=True)
stats = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/gyre/stats"
for turn in range(200 if "patient" in instruction else 0):
    ask([{"role": "user", "content": f"{instruction} {turn}"}], role="sub-agent", stream=turn % 2 == 0, tokens=800)
    asked = urllib.request.Request(stats, headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"})  # noqa: S310
    engines = json.load(urllib.request.urlopen(asked, timeout=60))["engines"]  # noqa: S310
    if sum(engine["routed"] for engine in engines.values()) < 2:
        break
final = ask([{"role": "user", "content": f"{instruction}\n{summary}\n{review}"}])
pathlib.Path("answer.txt").write_text(final)
